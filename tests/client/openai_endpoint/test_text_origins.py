"""Origins are runs over the text that a reply shows, checked against the origin of each of its letters."""

from hypothesis import given
from hypothesis import strategies as st

from kimi_client import Chunk
from kimi_client.replies.reader import ReplyReader
from kimi_openai.chat_replies import ChatWriter
from kimi_openai.replies import CompletionWriter

STATISTICS = {"num_prompt_tokens": 1, "num_output_tokens": 1, "num_cached_tokens": 0}
FIRST_LETTER = 0x4E00
"""Every letter of a text is another one, so that it says itself where it came from."""


@st.composite
def replies(draw, markers=()):
    """(chunks of a reply, each letter's origin). Text comes up to some characters later than its token."""
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
    origins = draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    marker_at = draw(st.integers(0, len(sizes) - 1)) if markers else -1
    text, offsets, controls, origin_of = "", [], (), {}
    for index, (size, origin) in enumerate(zip(sizes, origins, strict=True)):
        offsets.append(len(text))
        if index == marker_at:
            controls, text = (len(text),), text + markers[0]
            continue
        piece = "".join(chr(FIRST_LETTER + len(origin_of) + i) for i in range(size))
        origin_of |= dict.fromkeys(piece, origin)
        text += piece
    cuts = sorted([*draw(st.lists(st.integers(1, len(sizes)), max_size=6)), len(sizes)])
    late = draw(st.integers(0, 4))
    chunks, tokens_sent, chars_sent = [], 0, 0
    for cut in dict.fromkeys(cuts):
        is_last = cut == len(sizes)
        end = len(text) if is_last else max(chars_sent, (offsets[cut] if cut < len(sizes) else len(text)) - late)
        told = tuple(c for c in controls if tokens_sent <= marker_at < cut)
        chunks.append(
            Chunk(
                text[chars_sent:end],
                cut - tokens_sent,
                token_origins=tuple(origins[tokens_sent:cut]),
                token_offsets=tuple(offsets[tokens_sent:cut]),
                control_offsets=told,
                begins_thinking=bool(markers),
                **({"finish_reason": "stop", "statistics": STATISTICS} if is_last else {}),
            )
        )
        tokens_sent, chars_sent = cut, end
    return chunks, origin_of


def expanded(runs):
    return [origin for origin, num_chars in runs for _ in range(num_chars)]


@given(replies())
def test_a_completions_runs_are_its_letters_origins(reply):
    chunks, origin_of = reply
    writer = CompletionWriter(num_logprobs=None, with_token_ids=False, with_origins=True)
    for choice in (choice for chunk in chunks for choice in writer.choices(chunk)):
        assert expanded(choice["text_origins"]["text"]) == [origin_of[letter] for letter in choice["text"]]


@given(replies(markers=("</think>",)))
def test_a_chats_runs_are_its_letters_origins_on_both_sides_of_the_thoughts_end(reply):
    chunks, origin_of = reply
    writer = ChatWriter(
        lambda begins: ReplyReader(None, begins_thinking=begins),
        with_logprobs=False,
        with_token_ids=False,
        with_origins=True,
    )
    shown = ""
    for choice in (choice for chunk in chunks for choice in writer.choices(chunk)):
        for name, runs in choice.get("text_origins", {}).items():
            shown += choice["delta"][name]
            assert expanded(runs) == [origin_of[letter] for letter in choice["delta"][name]]
    assert shown == "".join(origin_of)


def test_neighbours_of_one_origin_are_one_run():
    writer = CompletionWriter(num_logprobs=None, with_token_ids=False, with_origins=True)
    chunk = Chunk("abcdef", 4, token_origins=(1, 1, 0, 1), token_offsets=(0, 2, 3, 5), finish_reason="stop")
    (choice,) = writer.choices(chunk)
    assert choice["text_origins"] == {"text": [[1, 3], [0, 2], [1, 1]]}


def test_nobody_gets_runs_who_did_not_ask():
    writer = CompletionWriter(num_logprobs=None, with_token_ids=False)
    (choice,) = writer.choices(Chunk("a", 1, finish_reason="stop"))
    assert "text_origins" not in choice
