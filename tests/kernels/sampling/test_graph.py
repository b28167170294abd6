"""Sampling inside a CUDA graph whose inputs change between replays while their shapes stay."""

import dataclasses
import random

import pytest
import torch

from kimi_kernels.sampling import naive
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NOT_FINITE, SamplingInputs, SamplingRows
from support.sampling_cases import SequenceCase, random_case, sampling_tensors
from support.sampling_logits import to_device

pytestmark = pytest.mark.gpu
CAPACITY = 64
"""Entries that each flat array holds, used or not."""
FLAT = (
    "penalty_ids",
    "penalty_counts",
    "penalty_in_prompt",
    "bias_ids",
    "bias_values",
    "ban_ids",
    "ban_until",
    "bad_word_tokens",
)
NUM_SEQUENCES = 6
NUM_WINDOW = 3
VOCAB_SIZE = 20_480


def padded(inputs: SamplingInputs, rows: SamplingRows) -> tuple[SamplingInputs, SamplingRows]:
    """The same contents in arrays of fixed shapes; rows beyond the real ones belong to an empty last sequence."""
    grown: dict[str, torch.Tensor] = {}
    for entry in dataclasses.fields(inputs):
        value = getattr(inputs, entry.name)
        if entry.name == "bad_word_token_offsets":
            grown[entry.name] = torch.cat([value, value[-1:].expand(CAPACITY - value.numel())])
        elif entry.name == "history_tail":
            width = 8 - value.shape[1]
            grown[entry.name] = torch.nn.functional.pad(value, (width, 0), value=PLACEHOLDER_TOKEN_ID)
        elif entry.name in FLAT:
            grown[entry.name] = torch.cat([value, value.new_zeros(CAPACITY - value.numel())])
        else:
            grown[entry.name] = value
    num_rows = NUM_SEQUENCES * (NUM_WINDOW + 1)
    missing = num_rows - rows.sequence.numel()
    return SamplingInputs(**grown), SamplingRows(
        sequence=torch.cat([rows.sequence, rows.sequence.new_full((missing,), NUM_SEQUENCES - 1)]),
        token_index=torch.nn.functional.pad(rows.token_index, (0, missing)),
        window_token_ids=torch.nn.functional.pad(
            rows.window_token_ids, (0, NUM_WINDOW - rows.window_token_ids.shape[1])
        ),
        window_len=torch.nn.functional.pad(rows.window_len, (0, missing)),
    )


def random_step(rng: random.Random, has_processors: bool) -> tuple[SamplingInputs, SamplingRows]:
    """Some sequences, the last of which is padding: greedy, without rows of its own."""
    cases = [random_case(rng, VOCAB_SIZE, NUM_WINDOW) for _ in range(NUM_SEQUENCES - 1)]
    if not has_processors:
        off = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        cases = [dataclasses.replace(case, bias={}, bans={}, bad_words=[], **off) for case in cases]  # type: ignore[arg-type]
    inputs, rows = padded(*sampling_tensors([*cases, SequenceCase(temperature=0.0, rows=[])]))
    if not has_processors:
        inputs = dataclasses.replace(inputs, **{name: getattr(inputs, name)[:0] for name in FLAT})
    return inputs, rows


def copy_into(target: object, source: object) -> None:
    for entry in dataclasses.fields(target):  # type: ignore[arg-type]
        value = getattr(target, entry.name)
        if value is not None:
            value.copy_(getattr(source, entry.name))


@pytest.mark.parametrize("has_processors", [False, True])
def test_replays_draw_what_the_judge_draws(has_processors: bool) -> None:
    """1,000 replays; every tenth with new parameters, so that every branch of every kernel comes and goes."""
    from kimi_kernels.sampling.kernel import sample_tokens

    rng = random.Random(int(has_processors))
    torch.manual_seed(0)
    on_host = random_step(rng, has_processors)
    inputs, rows = (to_device(value, "cuda") for value in on_host)
    assert isinstance(inputs, SamplingInputs) and isinstance(rows, SamplingRows)
    logits = torch.randn(rows.sequence.shape[0], VOCAB_SIZE, device="cuda")
    sample_tokens(logits, inputs, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample_tokens(logits, inputs, rows)
    for step in range(100):
        on_host = random_step(rng, has_processors)
        copy_into(inputs, on_host[0])
        copy_into(rows, on_host[1])
        logits.normal_().mul_(rng.choice((0.5, 2.0, 5.0)))
        logits[-2:] = float("nan")  # rows of padding may hold anything
        for _ in range(10):
            drawn.token_ids.fill_(-7)
            graph.replay()
        expected = naive.sample_tokens(logits.cpu(), *on_host)
        assert drawn.status.tolist() == expected.status.tolist(), step
        assert drawn.token_ids.tolist() == expected.token_ids.tolist(), step
        assert drawn.status[-1].item() == STATUS_NOT_FINITE


def test_verify_in_a_graph_with_padded_sequences() -> None:
    """A padded sequence has no draft tokens and one row, which it may share with others."""
    from kimi_kernels.sampling.kernel import verify_draft_tokens

    torch.manual_seed(0)
    num_seqs, width = 13, 3
    tokens = torch.zeros(num_seqs * (width + 1), dtype=torch.int64, device="cuda")
    status = torch.zeros(num_seqs * (width + 1), dtype=torch.int32, device="cuda")
    first_row = torch.zeros(num_seqs, dtype=torch.int64, device="cuda")
    draft = torch.zeros(num_seqs, width, dtype=torch.int32, device="cuda")
    num_draft = torch.zeros(num_seqs, dtype=torch.int32, device="cuda")
    arguments = (tokens, status, first_row, draft, num_draft)
    verify_draft_tokens(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = verify_draft_tokens(*arguments)
    for num_real in (0, 1, 7, num_seqs):
        num_draft.zero_()
        num_draft[:num_real] = torch.randint(0, width + 1, (num_real,), dtype=torch.int32)
        first_row.fill_(tokens.numel() - 1)
        first_row[:num_real] = ((num_draft + 1).cumsum(0) - num_draft - 1)[:num_real]
        tokens.random_(0, 2)
        draft.random_(0, 2)
        status.copy_((torch.rand(status.shape, device="cuda") < 0.1).int())
        graph.replay()
        expected = naive.verify_draft_tokens(*arguments)
        for name in ("output_token_ids", "num_accepted_tokens", "last_row", "status"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
