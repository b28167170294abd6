"""The tiktoken tokenizer against an independent cut into pieces and an independent merge loop."""

import base64
import itertools
import json
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_backend.errors import CheckpointError, InvalidRequestError
from kimi_backend.text.tiktoken_files import write_tokenizer
from kimi_backend.text.tiktoken_tokenizer import TiktokenTokenizer, slice_for_encoding
from kimi_backend.text.tokenizer import load_tokenizer
from support.tiny_tokenizers import (
    REGRESSION_CORPUS,
    tempting_ranks,
    tempting_tokenizer,
    texts,
)

RANKS = tempting_ranks()
NUM_RANKS = len(RANKS)
VOCAB_SIZE = 1024


def _letters(classes: str) -> str:
    return rf"(?:(?!\p{{Script=Han}})[{classes}])"


_UPPER = _letters(r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}")
_LOWER = _letters(r"\p{Ll}\p{Lm}\p{Lo}\p{M}")
_SPACE = r"\p{White_Space}"
_CONTRACTION = "(?:'(?:[sSſ]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?"  # noqa: RUF001
INDEPENDENT_PIECE = regex.compile(
    r"\p{Script=Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}\p{N}?\p{N}?"
    rf"|\x20?(?:(?!{_SPACE})[^\p{{L}}\p{{N}}])+[\r\n]*"
    rf"|{_SPACE}*[\r\n]+"
    rf"|{_SPACE}+(?={_SPACE}|\Z)"
    rf"|{_SPACE}+",
    regex.V1,
)


def merge_naively(piece: bytes) -> list[int]:
    """Byte pair encoding by its definition: merge the leftmost neighbours of least rank until none merge."""
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while True:
        pairs = [(RANKS[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in RANKS]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def encode_independently(text: str) -> list[int]:
    pieces = [match.group() for match in INDEPENDENT_PIECE.finditer(text)]
    assert "".join(pieces) == text
    return [token_id for piece in pieces for token_id in merge_naively(piece.encode())]


@given(text=texts())
@settings(deadline=None, max_examples=400)
def test_encodes_like_an_independent_implementation(text: str) -> None:
    assert tempting_tokenizer().encode(text) == encode_independently(text)


@pytest.mark.parametrize("text", REGRESSION_CORPUS)
def test_regression_corpus(text: str) -> None:
    tokenizer = tempting_tokenizer()
    token_ids = tokenizer.encode(text)
    assert token_ids == encode_independently(text)
    assert tokenizer.decode(token_ids) == text
    assert max(token_ids) < NUM_RANKS


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("aA bB", ["a", "A", " b", "B"]),
        ("ABab", ["ABab"]),
        ("a中文b", ["a", "中文", "b"]),
        ("1212121", ["121", "212", "1"]),
        ("a's A'S ab't", ["a's", " A'S", " ab't"]),
        ("a'sb", ["a's", "b"]),
        (" .!\n\na", [" .!\n\n", "a"]),
        ("a  \n  b", ["a", "  \n", " ", " b"]),
        ("a   ", ["a", "   "]),
        ("a  1", ["a", " ", " ", "1"]),
        ("\r\na", ["\r\n", "a"]),
        (".a", [".a"]),
        ("é中", ["é", "中"]),
    ],
)
def test_cuts_where_the_pattern_says(text: str, pieces: list[str]) -> None:
    expected = [token_id for piece in pieces for token_id in merge_naively(piece.encode())]
    assert tempting_tokenizer().encode(text) == expected


@given(text=texts(), allow_special=st.booleans())
@settings(deadline=None)
def test_decode_undoes_encode(text: str, allow_special: bool) -> None:
    tokenizer = tempting_tokenizer()
    token_ids = tokenizer.encode(text, allow_special)
    assert tokenizer.decode(token_ids) == text
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


@given(text=texts())
@settings(deadline=None)
def test_plain_text_never_gives_a_control_token(text: str) -> None:
    assert all(token_id < NUM_RANKS for token_id in tempting_tokenizer().encode(text))


def test_control_tokens_on_request() -> None:
    tokenizer = tempting_tokenizer()
    token_ids = tokenizer.encode("a<|im_end|><think>[BOS", allow_special=True)
    assert token_ids[1:3] == [NUM_RANKS + 2, NUM_RANKS + 22]
    assert tokenizer.decode(token_ids, skip_special=True) == "a<think>[BOS"
    reserved = tokenizer.encode(f"<|reserved_token_{NUM_RANKS + 5}|>", allow_special=True)
    assert reserved == [NUM_RANKS + 5]
    assert tokenizer.is_special(NUM_RANKS + 5)
    assert not tokenizer.is_special(NUM_RANKS + 22)


def test_ids_without_a_token_decode_to_nothing() -> None:
    tokenizer = tempting_tokenizer()
    assert tokenizer.decode([97, tokenizer.vocab_size, 10**9]) == "a"
    with pytest.raises(ValueError, match="-1 is negative"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "中\ud83d"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D"):
        tempting_tokenizer().encode(text)


@pytest.mark.parametrize("unit", ["a", " ", "\n", "A", "中", "!", "1", "é", "\t ", "🙂", "ab12 中!\r\n"])
def test_very_long_input(unit: str) -> None:
    text = unit * (900_000 // len(unit))
    tokenizer = tempting_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def slice_by_counting(text: str, max_slice: int, max_run: int) -> list[str]:
    """The rule, one character at a time."""
    parts: list[str] = []
    run = 0
    for index, char in enumerate(text):
        starts_slice = index % max_slice == 0
        same_kind = not starts_slice and char.isspace() == text[index - 1].isspace()
        run = run + 1 if same_kind else 1
        if starts_slice or run > max_run:
            parts.append("")
            run = 1
        parts[-1] += char
    return parts


@given(text=st.text(alphabet="ab \n", max_size=60), max_slice=st.integers(1, 20), max_run=st.integers(1, 6))
def test_slices_follow_the_rule(text: str, max_slice: int, max_run: int) -> None:
    parts = [part for part in slice_for_encoding(text, max_slice, max_run) if part]
    assert parts == slice_by_counting(text, max_slice, max_run)


def test_files_round_trip(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, TiktokenTokenizer)
    first = VOCAB_SIZE - 256
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (first, first + 1, (first + 2,))
    assert len(tokenizer.control_tokens) == 256
    assert tokenizer.control_tokens["<|media_pad|>"] == first + 21
    assert tokenizer.control_tokens[f"<|reserved_token_{first + 100}|>"] == first + 100


def _edit_json(path: Path, change: object) -> None:
    config = json.loads(path.read_text())
    change(config)  # type: ignore[operator]
    path.write_text(json.dumps(config))


def _line(token: bytes, rank: object) -> str:
    return f"{base64.b64encode(token).decode()} {rank}"


BROKEN_RANKS = {
    "one field": (lambda lines: lines.__setitem__(5, "YQ=="), "line 6: 'YQ==' has 1 fields"),
    "not base64": (lambda lines: lines.__setitem__(5, "@@ 5"), "line 6: '@@' is not base64"),
    "rank is a word": (lambda lines: lines.__setitem__(5, _line(b"x", "five")), "line 6: rank 'five' is not a whole"),
    "negative rank": (lambda lines: lines.__setitem__(5, _line(b"\x05", -5)), "line 6: rank '-5' is not a whole"),
    "token twice": (lambda lines: lines.append(_line(b"\x05", 768)), r"line 769: token b'\\x05' is on line 6 already"),
    "rank twice": (lambda lines: lines.append(_line(b"zzzzz", 5)), "line 769: rank 5 is on line 6 already"),
    "a byte missing": (lambda lines: lines.__setitem__(5, _line(b"zzzzz", 5)), r"1 of 256 single bytes .*\(0x05\)"),
    "a gap": (lambda lines: lines.__setitem__(300, _line(b"zzzzz", 900)), "rank 300 is missing"),
    "empty": (lambda lines: lines.clear(), "256 of 256 single bytes"),
}


@pytest.mark.parametrize("case", BROKEN_RANKS)
def test_malformed_ranks_are_named(case: str, tmp_path: Path) -> None:
    change, message = BROKEN_RANKS[case]
    write_tokenizer(tmp_path, VOCAB_SIZE)
    path = tmp_path / "tiktoken.model"
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)


def test_many_problems_are_counted(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    (tmp_path / "tiktoken.model").write_text("nonsense\n" * 100)
    with pytest.raises(CheckpointError, match=r"line 1:(.|\n)*and 80 more"):
        load_tokenizer(tmp_path)


BROKEN_CONFIGS = {
    "not an object": (lambda c: c.update(added_tokens_decoder=[]), "added_tokens_decoder is a list"),
    "key is a word": (lambda c: c["added_tokens_decoder"].update(x={"content": "y"}), r"\['x'\]: the key must be"),
    "no content": (lambda c: c["added_tokens_decoder"].update({"800": {}}), r"\['800'\].content is None"),
    "content twice": (
        lambda c: c["added_tokens_decoder"].update({"800": {"content": "[BOS]"}}),
        r"\['800'\].content '\[BOS\]' also belongs to id 768",
    ),
    "special is a word": (
        lambda c: c["added_tokens_decoder"].update({"800": {"content": "x", "special": "yes"}}),
        "special is 'yes'; true or false",
    ),
    "id of a rank": (
        lambda c: c["added_tokens_decoder"].update({"5": {"content": "x"}}),
        "takes the id of a token in tiktoken.model; allowed: 768 and up",
    ),
    "name of a reserved id": (
        lambda c: c["added_tokens_decoder"].update({"800": {"content": "<|reserved_token_801|>"}}),
        "the name of another id",
    ),
    "unknown bos": (lambda c: c.update(bos_token="<s>"), "bos_token is '<s>', which is not in"),
    "bos is a number": (lambda c: c.update(bos_token=3), "bos_token is 3; a token's text"),
    "template is a number": (lambda c: c.update(chat_template=3), r"chat_template\[0\]: a string"),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_malformed_config_is_named(case: str, tmp_path: Path) -> None:
    change, message = BROKEN_CONFIGS[case]
    write_tokenizer(tmp_path, VOCAB_SIZE)
    path = tmp_path / "tokenizer_config.json"
    _edit_json(path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON: .*line 1"), ("[]", "holds a list; a JSON object"), (b"\xff\xfe", "byte 0 is not UTF-8")],
)
def test_unreadable_config_is_named(content: str | bytes, message: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: the file does not exist"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [770, 769, 770]}, {}, (770, 769)),
        ({"eos_token_id": 769}, {"eos_token_id": 1}, (769,)),
        ({}, {"eos_token_id": 771}, (771,)),
        ({}, {"text_config": {"eos_token_id": 772}}, (772,)),
        ({}, {}, (769,)),
        (None, None, (769,)),
    ],
)
def test_what_ends_a_reply(generation: dict | None, config: dict | None, expected: tuple, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        (tmp_path / name).write_text(json.dumps(content)) if content is not None else (tmp_path / name).unlink(True)
    assert load_tokenizer(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("value", [VOCAB_SIZE, -1, "2", [], [1, None], True, 1.0])
def test_bad_end_of_reply_is_named(value: object, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        CheckpointError, match=r"generation_config.json: eos_token_id is .*allowed: an id from 0 to 1023"
    ):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected tiktoken.model or tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        load_tokenizer(tmp_path / "file")


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('ran')")
    _edit_json(
        tmp_path / "tokenizer_config.json",
        lambda config: config.update(auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}),
    )
    assert load_tokenizer(tmp_path).decode([97]) == "a"
