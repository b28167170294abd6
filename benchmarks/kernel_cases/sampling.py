"""Sampling over the whole vocabulary, and the draft check: time against reading the logits once."""

from collections.abc import Callable
from dataclasses import replace

import torch

from kernel_cases import Case, Prepared, num_input_sets
from kimi_kernels import KernelSet
from kimi_kernels.sampling import plain
from kimi_kernels.sampling_inputs import SamplingInputs, SamplingRows

VOCAB_SIZE = 163_840
NUM_CHECKED = 16
"""Rows of the check that plain torch draws too."""


def cases(kernels: KernelSet) -> list[Case]:
    """Greedy, noise, top-p on flat and on peaked rows, top-k; 1 to 256 rows; one verify."""
    found = [
        _case(kernels, "greedy", 256, temperature=0.0, limit_us=75.0, peer="torch argmax 86.6"),
        _case(kernels, "noise", 256),
        _case(kernels, "top-p .95 flat", 256, spread=1.0, top_p=0.95, limit_us=250.0, peer="FlashInfer top-p 152"),
        _case(kernels, "top-p .95 peaked", 256, spread=6.0, top_p=0.95, limit_us=250.0, peer="FlashInfer top-p 152"),
        _case(kernels, "min-p .05", 256, min_p=0.05),
        _case(kernels, "top-k 20 top-p .95", 256, top_k=20, top_p=0.95, peer="FlashInfer 573"),
        _case(kernels, "top-p .95 bf16", 256, top_p=0.95, dtype=torch.bfloat16),
        _case(kernels, "greedy", 1, temperature=0.0, peer="torch argmax 10.9"),
        _case(kernels, "greedy", 64, temperature=0.0, peer="torch argmax 28.5"),
        _case(kernels, "top-p .95", 1, top_p=0.95, peer="FlashInfer top-p 43.1"),
        _case(kernels, "top-p .95", 16, top_p=0.95, peer="FlashInfer top-p 45.0"),
        _case(kernels, "top-p .95", 64, top_p=0.95, peer="FlashInfer top-p 47.3"),
    ]
    verify = Case(
        op="verify",
        name="64 sequences, 3 drafts",
        num_bytes=64 * (4 * 12 + 3 * 4 + 3 * 8),
        num_flops=0,
        prepare=lambda: _prepare_verify(kernels),
    )
    return [*found, verify]


def _case(
    kernels: KernelSet,
    what: str,
    num_rows: int,
    *,
    spread: float = 3.0,
    dtype: torch.dtype = torch.float32,
    limit_us: float | None = None,
    peer: str = "",
    **settings: float,
) -> Case:
    def prepare() -> Prepared:
        return _prepare(kernels, num_rows, spread, dtype, settings)

    return Case(
        op="sampling",
        name=f"{what}, {num_rows} rows",
        num_bytes=num_rows * VOCAB_SIZE * dtype.itemsize,
        num_flops=0,
        prepare=prepare,
        limit_us=limit_us,
        peer=peer,
    )


def _prepare(
    kernels: KernelSet, num_rows: int, spread: float, dtype: torch.dtype, settings: dict[str, float]
) -> Prepared:
    num_sets = num_input_sets(num_rows * VOCAB_SIZE * dtype.itemsize, at_most=64)
    logits = [torch.randn(num_rows, VOCAB_SIZE, device="cuda").mul_(spread).to(dtype) for _ in range(num_sets)]
    inputs = _inputs(num_rows, settings)
    rows = [_rows(num_rows, first_index=1000 * number) for number in range(num_sets)]

    def call(number: int) -> Callable[[], object]:
        return lambda: kernels.sample_tokens(logits[number], inputs, rows[number])

    def check() -> float:
        drawn = kernels.sample_tokens(logits[0], inputs, rows[0])
        few = slice(0, min(num_rows, NUM_CHECKED))
        some = replace(
            rows[0],
            sequence=rows[0].sequence[few],
            token_index=rows[0].token_index[few],
            window_len=rows[0].window_len[few],
        )
        expected = plain.sample_tokens(logits[0][few], inputs, some)
        assert torch.equal(drawn.token_ids[few], expected.token_ids), "other tokens than plain torch's"
        assert not drawn.status.any()
        return 0.0

    return Prepared(calls=[call(number) for number in range(num_sets)], check=check)


def _inputs(num_seqs: int, settings: dict[str, float]) -> SamplingInputs:
    def filled(name: str, off: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_seqs,), settings.get(name, off), dtype=dtype, device="cuda")

    no_offsets = torch.zeros(num_seqs + 1, dtype=torch.int32, device="cuda")
    nothing = torch.zeros(0, dtype=torch.int32, device="cuda")
    return SamplingInputs(
        temperature=filled("temperature", 1.0),
        top_k=filled("top_k", 0, torch.int32),
        top_p=filled("top_p", 1.0),
        min_p=filled("min_p", 0.0),
        seed=torch.arange(num_seqs, device="cuda") * 7919,
        repetition_penalty=filled("repetition_penalty", 1.0),
        frequency_penalty=filled("frequency_penalty", 0.0),
        presence_penalty=filled("presence_penalty", 0.0),
        penalty_offsets=no_offsets,
        penalty_ids=nothing,
        penalty_counts=nothing,
        penalty_in_prompt=nothing.bool(),
        bias_offsets=no_offsets,
        bias_ids=nothing,
        bias_values=nothing.float(),
        ban_offsets=no_offsets,
        ban_ids=nothing,
        ban_until=nothing.long(),
        bad_word_offsets=no_offsets,
        bad_word_token_offsets=no_offsets[:1],
        bad_word_tokens=nothing,
        history_tail=nothing.view(1, 0).expand(num_seqs, 0),
    )


def _rows(num_rows: int, first_index: int) -> SamplingRows:
    return SamplingRows(
        sequence=torch.arange(num_rows, device="cuda"),
        token_index=torch.arange(num_rows, device="cuda") + first_index,
        window_token_ids=torch.zeros(num_rows, 0, dtype=torch.int32, device="cuda"),
        window_len=torch.zeros(num_rows, dtype=torch.int32, device="cuda"),
    )


def _prepare_verify(kernels: KernelSet) -> Prepared:
    num_seqs, width = 64, 3
    tokens = torch.randint(0, 2, (num_seqs * (width + 1),), device="cuda")
    status = torch.zeros_like(tokens, dtype=torch.int32)
    arguments = (
        tokens,
        status,
        torch.arange(num_seqs, device="cuda") * (width + 1),
        torch.randint(0, 2, (num_seqs, width), dtype=torch.int32, device="cuda"),
        torch.full((num_seqs,), width, dtype=torch.int32, device="cuda"),
    )

    def check() -> float:
        got, expected = kernels.verify_draft_tokens(*arguments), plain.verify_draft_tokens(*arguments)
        for name in ("output_token_ids", "num_accepted_tokens", "last_row", "status"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        return 0.0

    return Prepared(calls=[lambda: kernels.verify_draft_tokens(*arguments)] * 16, check=check)
