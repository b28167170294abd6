"""Sequences that sample, described by their tokens, and the tensors that the sampling ops read for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kimi_kernels.sampling_inputs import BANNED_FOREVER, PLACEHOLDER_TOKEN_ID, SamplingInputs, SamplingRows


@dataclass(kw_only=True)
class SequenceCase:
    """One sequence of a step: `rows` names each row by how many window tokens stand before its draw."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=lambda: [0])
    bias: dict[int, float] = field(default_factory=dict)
    bans: dict[int, int] = field(default_factory=dict)
    bad_words: list[list[int]] = field(default_factory=list)

    @property
    def uses_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def token_index(self, window_len: int) -> int:
        return len(self.prompt) + len(self.output) + window_len


def random_case(rng: random.Random, vocab_size: int, num_window: int = 0) -> SequenceCase:
    """Every feature on or off, with values that make ties and borders likely."""
    token = lambda: rng.randrange(vocab_size)  # noqa: E731
    maybe = lambda value, off: value if rng.random() < 0.4 else off  # noqa: E731
    history = [token() for _ in range(rng.randrange(1, 9))]
    cut = rng.randrange(1, len(history) + 1)
    window = [rng.choice((*history, token())) for _ in range(rng.randrange(num_window + 1))]
    tokens = history + window
    word_end = rng.randrange(len(tokens) + 1)
    likely_word = [*tokens[max(0, word_end - rng.randrange(1, 4)) : word_end], token()]
    return SequenceCase(
        temperature=rng.choice((0.0, 0.3, 0.7, 1.0, 1.0, 1.7, 9e-6, 1.1e-5)),
        top_k=maybe(rng.choice((1, 2, 5, vocab_size // 2, vocab_size, vocab_size + 9)), 0),
        top_p=maybe(rng.choice((0.0, 0.1, 0.5, 0.9, 0.99)), 1.0),
        min_p=maybe(rng.choice((0.01, 0.1, 0.5, 1.0)), 0.0),
        seed=rng.randrange(2**64),
        repetition_penalty=maybe(rng.choice((0.7, 1.3, 2.0)), 1.0),
        frequency_penalty=maybe(rng.choice((-0.5, 0.3, 1.1)), 0.0),
        presence_penalty=maybe(rng.choice((-1.0, 0.6)), 0.0),
        prompt=history[:cut],
        output=history[cut:],
        window=window,
        rows=list(range(len(window) + 1)) if rng.random() < 0.8 else [len(window)],
        bias=maybe({token(): rng.choice((-3.0, 0.25, 4.0)) for _ in range(3)}, {}),
        bans=maybe({token(): rng.choice((BANNED_FOREVER, len(history), len(history) + 1)) for _ in range(3)}, {}),
        bad_words=maybe([likely_word, [token(), token()], [token() for _ in range(4)]], []),
    )


def sampling_tensors(
    cases: Sequence[SequenceCase], row_masks: torch.Tensor | None = None
) -> tuple[SamplingInputs, SamplingRows]:
    """The tensors of a step in which these sequences sample. row_masks: [R, words], of rows that may draw all -1."""
    words = [[word for word in case.bad_words if len(word) > 1] for case in cases]
    max_tail = max((len(word) - 1 for of_case in words for word in of_case), default=0)
    penalties = [_penalty_entries(case) if case.uses_penalty else {} for case in cases]
    entries = [(token, *entry) for of_case in penalties for token, entry in of_case.items()]
    flat_words = [word for of_case in words for word in of_case]
    inputs = SamplingInputs(
        temperature=_float([case.temperature for case in cases]),
        top_k=_int([case.top_k for case in cases]),
        top_p=_float([case.top_p for case in cases]),
        min_p=_float([case.min_p for case in cases]),
        seed=torch.tensor([case.seed - 2**64 if case.seed >= 2**63 else case.seed for case in cases]),
        repetition_penalty=_float([case.repetition_penalty for case in cases]),
        frequency_penalty=_float([case.frequency_penalty for case in cases]),
        presence_penalty=_float([case.presence_penalty for case in cases]),
        penalty_offsets=_offsets([len(of_case) for of_case in penalties]),
        penalty_ids=_int([entry[0] for entry in entries]),
        penalty_counts=_int([entry[1] for entry in entries]),
        penalty_in_prompt=torch.tensor([entry[2] for entry in entries], dtype=torch.bool),
        bias_offsets=_offsets([len(case.bias) for case in cases]),
        bias_ids=_int([token for case in cases for token in case.bias]),
        bias_values=_float([value for case in cases for value in case.bias.values()]),
        ban_offsets=_offsets([len(case.bans) for case in cases]),
        ban_ids=_int([token for case in cases for token in case.bans]),
        ban_until=torch.tensor([until for case in cases for until in case.bans.values()], dtype=torch.int64),
        bad_word_offsets=_offsets([len(of_case) for of_case in words]),
        bad_word_token_offsets=_offsets([len(word) for word in flat_words]),
        bad_word_tokens=_int([token for word in flat_words for token in word]),
        history_tail=_padded(
            [(case.prompt + case.output)[-max_tail:] if max_tail else [] for case in cases], max_tail, to_right=True
        ),
    )
    row_of = [(b, window_len) for b, case in enumerate(cases) for window_len in case.rows]
    rows = SamplingRows(
        sequence=torch.tensor([b for b, _ in row_of], dtype=torch.int64),
        token_index=torch.tensor([cases[b].token_index(n) for b, n in row_of], dtype=torch.int64),
        window_token_ids=_padded(
            [case.window for case in cases], max((len(case.window) for case in cases), default=0), to_right=False
        ),
        window_len=_int([n for _, n in row_of]),
        **_masks(row_masks),
    )
    return inputs, rows


def _masks(row_masks: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Masks of those rows that have one, the last row's first."""
    if row_masks is None:
        return {}
    is_masked = (row_masks != -1).any(dim=1)
    number = is_masked.flip(0).cumsum(0).flip(0) - 1
    return {
        "logit_mask": row_masks[is_masked].flip(0).contiguous(),
        "mask_of_row": torch.where(is_masked, number, -1).to(torch.int32),
    }


def _penalty_entries(case: SequenceCase) -> dict[int, tuple[int, bool]]:
    return {
        token: (case.output.count(token), token in case.prompt) for token in dict.fromkeys(case.prompt + case.output)
    }


def _float(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _int(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _padded(lists: list[list[int]], width: int, to_right: bool) -> torch.Tensor:
    """Right-aligned lists have placeholders to the left. Beyond a window stands a token that must not count."""
    table = torch.full((len(lists), width), PLACEHOLDER_TOKEN_ID if to_right else 0, dtype=torch.int32)
    for row, values in enumerate(lists):
        if values:
            at = slice(width - len(values), width) if to_right else slice(0, len(values))
            table[row, at] = torch.tensor(values, dtype=torch.int32)
    return table
