"""Deltas joined are the full decode, whatever the ids and however they are cut."""

import json
import time
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_backend.text.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, make_detokenizer
from kimi_backend.text.hf_tokenizer import HfTokenizer
from kimi_backend.text.tokenizer import Tokenizer
from support.tiny_tokenizers import (
    REGRESSION_CORPUS,
    byte_level_hf_tokenizer,
    sentencepiece_hf_tokenizer,
    tempting_tokenizer,
    wordpiece_hf_tokenizer,
)

TOKENIZERS = {
    "tiktoken": tempting_tokenizer,
    "byte_level": byte_level_hf_tokenizer,
    "sentencepiece": sentencepiece_hf_tokenizer,
    "wordpiece": wordpiece_hf_tokenizer,
}
AWKWARD_BYTES = [b"\xf0\x9f\x98\x80", b"\xf0\x9f\x98", b"\xef\xbf\xbd", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5"]


def check_stream(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int], skip_special: bool) -> None:
    detokenizer = make_detokenizer(tokenizer, skip_special)
    full = tokenizer.decode(token_ids, skip_special)
    emitted = ""
    borders = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    for start, end in pairwise(borders):
        emitted += detokenizer.push(token_ids[start:end])
        assert full.startswith(emitted)
        # At most three bytes wait. (Where the vocabulary has U+FFFD itself, the window cannot tell it from a wait.)
        num_waiting = len(tokenizer.decode(token_ids[:end], skip_special)) - len(emitted)
        assert num_waiting <= 3 or not tokenizer.is_byte_level
    assert emitted + detokenizer.finish() == full


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), cuts=st.lists(st.integers(0, 100), max_size=10), skip_special=st.booleans())
@settings(max_examples=150)
def test_deltas_join_to_the_full_decode(name: str, data: st.DataObject, cuts: list[int], skip_special: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    some_id = st.integers(0, tokenizer.vocab_size + 2)
    token_ids = data.draw(st.lists(some_id, max_size=40))
    check_stream(tokenizer, token_ids, cuts, skip_special)


@given(
    data=st.lists(
        st.one_of(
            st.binary(max_size=4),
            st.text(max_size=3).map(lambda text: text.encode("utf-8", "surrogatepass")),
            st.sampled_from(
                [b"\xf0\x9f\x98\x80", b"\xf0\x9f\x98", b"\xef\xbf\xbd", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5"]
            ),
        ),
        max_size=12,
    ).map(b"".join),
    specials=st.lists(st.integers(0, 60), max_size=3),
)
@settings(max_examples=300)
def test_any_bytes_one_at_a_time(data: bytes, specials: list[int]) -> None:
    tokenizer = tempting_tokenizer()
    token_ids = list(data)
    for place in specials:
        token_ids.insert(place, tokenizer.control_tokens["<|im_end|>"])
    cuts = list(range(len(token_ids) + 1))
    check_stream(tokenizer, token_ids, cuts, skip_special=True)
    check_stream(tokenizer, token_ids, cuts, skip_special=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60)
def test_push_each_is_push_token_by_token(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=20))
    pieces = make_detokenizer(tokenizer).push_each(token_ids)
    detokenizer = make_detokenizer(tokenizer)
    assert pieces == [detokenizer.push([token_id]) for token_id in token_ids]


@pytest.mark.parametrize("text", REGRESSION_CORPUS)
def test_regression_corpus_token_by_token(text: str) -> None:
    tokenizer = tempting_tokenizer()
    token_ids = tokenizer.encode(text)
    check_stream(tokenizer, token_ids, list(range(len(token_ids))), skip_special=True)


def test_a_character_comes_when_its_last_byte_does() -> None:
    detokenizer = make_detokenizer(tempting_tokenizer())
    assert [detokenizer.push([byte]) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert detokenizer.finish() == ""


def test_an_open_character_becomes_u_fffd_at_the_end() -> None:
    detokenizer = make_detokenizer(tempting_tokenizer())
    assert detokenizer.push([0xE4, 0xB8]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_skipped_tokens_do_not_break_a_character() -> None:
    tokenizer = tempting_tokenizer()
    detokenizer = make_detokenizer(tokenizer)
    end = tokenizer.control_tokens["<|im_end|>"]
    assert detokenizer.push([0xE4, end, 0xB8, end, 0xAD]) == "中"


def test_the_kind_follows_the_tokenizer() -> None:
    assert isinstance(make_detokenizer(sentencepiece_hf_tokenizer()), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(wordpiece_hf_tokenizer()), WindowDetokenizer)


def test_the_window_waits_for_the_last_byte_too() -> None:
    vocab = {f"<0x{value:02X}>": value for value in range(256)} | {"a": 256}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    library.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    detokenizer = make_detokenizer(HfTokenizer(json.loads(library.to_str()), {}))
    assert isinstance(detokenizer, WindowDetokenizer)
    assert [detokenizer.push([token_id]) for token_id in [256, *"中".encode(), 256]] == ["a", "", "", "中", "a"]
    assert detokenizer.push([0xE4]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("name", ["tiktoken", "wordpiece"])
def test_work_per_token_does_not_grow(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    token_id = 97 if name == "tiktoken" else 4
    detokenizer = make_detokenizer(tokenizer)

    def seconds(num_tokens: int) -> float:
        started = time.thread_time()
        for _ in range(num_tokens):
            detokenizer.push([token_id])
        return time.thread_time() - started

    first = min(seconds(500) for _ in range(3))
    seconds(20_000)
    assert min(seconds(500) for _ in range(3)) < 10 * first
