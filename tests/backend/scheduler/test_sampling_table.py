"""Plans cut from the table equal inputs built from scratch, whatever rows are used in whatever order."""

import random

import numpy as np
import pytest

from kimi_backend.scheduler.sampling_table import BANNED_FOREVER, SamplingPlanBuilder, SamplingTable
from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.types.plan import SamplingPlan
from kimi_kernels import sampling_inputs
from support.random_requests import random_sampling
from support.sampling_cases import SequenceCase, sampling_tensors
from support.sequences import make_sequence

VOCAB = 40


def random_sequence(rng: random.Random, uid: int) -> Sequence:
    params = random_sampling(rng, VOCAB, 30)
    fields = {name: getattr(params, name) for name in params.__dataclass_fields__ if name != "seed"}
    assert params.seed is not None
    sequence = make_sequence(
        tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))),
        uid=uid,
        seed=params.seed,
        eos_token_ids=frozenset({3}),
        **fields,
    )
    sequence.stop_token_ids = sequence.stop_token_ids - {1}
    return sequence


def from_scratch(sequences: list[Sequence]) -> sampling_inputs.SamplingInputs:
    cases = []
    for sequence in sequences:
        params, tokens = sequence.params, sequence.token_ids.tolist()
        bans = {word[0]: BANNED_FOREVER for word in params.bad_words if len(word) == 1}
        if params.min_tokens:
            until = sequence.num_prompt_tokens + params.min_tokens
            bans = dict.fromkeys(sequence.stop_token_ids, until) | bans
        cases.append(
            SequenceCase(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=sequence.seed,
                repetition_penalty=params.repetition_penalty,
                frequency_penalty=params.frequency_penalty,
                presence_penalty=params.presence_penalty,
                prompt=tokens[: sequence.num_prompt_tokens],
                output=tokens[sequence.num_prompt_tokens :],
                bias=dict(params.logit_bias),
                bans=bans,
                bad_words=[list(word) for word in params.bad_words],
            )
        )
    return sampling_tensors(cases)[0]


def entries(offsets: np.ndarray, *arrays: np.ndarray) -> list[set[tuple[float, ...]]]:
    """A CSR without its order."""
    pairs = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return [set(zip(*(a[start:end].tolist() for a in arrays), strict=True)) for start, end in pairs]


def check_equal(plan: SamplingPlan, wanted: sampling_inputs.SamplingInputs) -> None:
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "frequency_penalty"):
        got, want = getattr(plan, name), getattr(wanted, name).numpy()
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    for offsets, names in (
        ("penalty_offsets", ("penalty_ids", "penalty_counts", "penalty_in_prompt")),
        ("bias_offsets", ("bias_ids", "bias_values")),
        ("ban_offsets", ("ban_ids", "ban_until")),
    ):
        got = [getattr(plan, name) for name in (offsets, *names)]
        want = [getattr(wanted, name).numpy() for name in (offsets, *names)]
        assert [a.dtype for a in got] == [a.dtype for a in want]
        assert entries(*got) == entries(*want)
    for name in ("bad_word_offsets", "bad_word_token_offsets", "bad_word_tokens"):
        got, want = getattr(plan, name), getattr(wanted, name).numpy()
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    has_words = np.diff(plan.bad_word_offsets) > 0  # nobody reads the others' tails
    assert plan.history_tail.shape == tuple(wanted.history_tail.shape)
    np.testing.assert_array_equal(plan.history_tail[has_words], wanted.history_tail.numpy()[has_words])


@pytest.mark.parametrize("seed", range(20))
def test_plans_equal_inputs_built_from_scratch(seed: int) -> None:
    rng = random.Random(seed)
    table, rows = SamplingTable(12), list(range(12))
    builder = SamplingPlanBuilder(table)
    sequences = [random_sequence(rng, uid) for uid in range(12)]
    for row, sequence in enumerate(sequences):
        table.set_row(row, sequence)
    for step in range(12):
        if step % 4 == 3:  # a row changes hands
            row = rng.randrange(12)
            sequences[row] = random_sequence(rng, 100 + step)
            table.set_row(row, sequences[row])
        if step % 3 == 0:
            rows = rng.sample(range(12), rng.randrange(1, 13))
        chosen = [sequences[row] for row in rows]
        check_equal(builder.build(np.array(rows, np.int64), chosen), from_scratch(chosen))
        for sequence in chosen:
            if sequence.num_remaining_tokens > 3:
                sequence.append([rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 4))])


def test_what_does_not_change_is_not_built_again() -> None:
    table = SamplingTable(2)
    builder = SamplingPlanBuilder(table)
    sequences = [make_sequence(uid=uid, logit_bias={4: 1.0}) for uid in range(2)]
    for row, sequence in enumerate(sequences):
        table.set_row(row, sequence)
    rows = np.arange(2, dtype=np.int64)
    first = builder.build(rows, sequences)
    sequences[0].append([4, 5])
    assert builder.build(rows, sequences) is first
    table.set_row(1, make_sequence(uid=2, temperature=0.5))
    assert builder.build(rows, sequences).temperature.tolist() == [1.0, 0.5]


def test_the_constant_is_the_sampling_ops_own() -> None:
    assert BANNED_FOREVER == sampling_inputs.BANNED_FOREVER
