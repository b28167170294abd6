"""Both drafts against a naive float64 implementation written from the formulas, over prefill, extend, k single-row
steps, and after rejections."""

from typing import Any

import pytest
import torch

from kimi_backend.config.draft_config import DraftOverrides
from support.draft_steps import DraftSteps, build_draft, build_stored_draft
from support.naive_eagle3 import NaiveDraft
from support.tiny_checkpoints import random_draft, with_biases
from support.tiny_configs import YARN, draft_config, target_config

MAX_RELATIVE_ERROR = 1e-4
TARGET = target_config()

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "MLA": ("mla", {}),
    "MLA 3.1": ("mla31", {}),
    "MLA without compressed queries, three heads": ("mla", {"q_lora_rank": None, "num_attention_heads": 3}),
    "MLA, plain rope, residual from the normed hidden": ("mla", {"rope_scaling": None, "norm_before_residual": True}),
    "MLA, half-split rope, wider than the target": (
        "mla31",
        {"rope_interleave": False, "hidden_size": 96, "target_hidden_size": 64},
    ),
    "MHA, two query heads a key head": ("mha", {}),
    "MHA, sliding window": ("mha", {"sliding_window": 7, "num_key_value_heads": 4}),
    "MHA 3.1, yarn": (
        "mha",
        {"rope_scaling": dict(YARN), "fc_norm": True, "norm_output": True, "num_key_value_heads": 1},
    ),
    "MHA, reduced vocabulary": ("mha", {"draft_vocab_size": 48}),
    "MLA, reduced vocabulary": ("mla", {"draft_vocab_size": 48}),
    "MLA of three layers": ("mla31", {"num_hidden_layers": 3}),
    "MHA of two layers, residual from the normed hidden": (
        "mha",
        {"num_hidden_layers": 2, "norm_before_residual": True},
    ),
    "MHA, a norm over all aux states": ("mha", {"norm_before_fc": True}),
    "MHA, linear rope": ("mha", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "MHA, Llama 3's rope": (
        "mha",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "rope_theta": 100.0,
        },
    ),
}
BIASED = {
    "MHA with biases": ("mha", {"attention_bias": True, "num_hidden_layers": 2}),
    "MLA 3.1 with biases": ("mla31", {"attention_bias": True, "norm_before_residual": True}),
    "MLA with biases, a norm over all aux states": ("mla", {"q_lora_rank": None, "norm_before_fc": True}),
}
CASES |= BIASED


def assert_close(ours: torch.Tensor, naive: torch.Tensor) -> None:
    error = (ours.double() - naive).abs().max() / naive.abs().max()
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.2e}"


class Pair:
    """A draft and its naive twin, fed the same rows."""

    def __init__(self, kind: str, fields: dict[str, Any], *, has_biases: bool = False) -> None:
        self.config = draft_config(kind, TARGET, **fields)
        tensors = random_draft(self.config)
        if has_biases:
            tensors = with_biases(tensors)
        self.draft = build_stored_draft(self.config, tensors)
        # A second sequence rides along in every extension, so that batches are ragged.
        self.steps = DraftSteps(self.draft, [64, 64])
        self.naive = NaiveDraft(self.config, tensors)
        self.generator = torch.Generator().manual_seed(0)

    def aux(self, num_rows: int) -> torch.Tensor:
        width = self.config.num_aux_hidden_states * self.config.target_hidden_size
        return 2 * torch.randn(num_rows, width, generator=self.generator)

    def tokens(self, num_rows: int) -> list[int]:
        return torch.randint(0, self.config.vocab_size, (num_rows,), generator=self.generator).tolist()

    def extend(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows with fresh aux states. Checks every row; returns the feedback of the last one, ours and the naive."""
        aux, tokens = self.aux(num_rows), self.tokens(num_rows)
        beside_aux, beside_tokens = self.aux(2), self.tokens(2)
        chunks = [(0, tokens), (1, beside_tokens)]
        hidden = [self.draft.combine_aux(aux), self.draft.combine_aux(beside_aux)]
        logits, feedback = self.steps.step(chunks, hidden)
        naive_feedback = torch.empty(0)
        for row in range(num_rows):
            naive_logits, naive_feedback = self.naive.row(self.naive.fuse(aux[row]), tokens[row])
            assert_close(logits[0][row], naive_logits)
            assert_close(feedback[0][row], naive_feedback)
        return feedback[0][-1:], naive_feedback

    def single_steps(self, count: int, feedback: torch.Tensor, naive_feedback: torch.Tensor) -> None:
        """Rows that read the hidden state of the row before."""
        for token in self.tokens(count):
            logits, (feedback,) = self.steps.step([(0, [token])], [feedback])
            naive_logits, naive_feedback = self.naive.row(naive_feedback, token)
            assert_close(logits[0][0], naive_logits)

    def reject(self, count: int) -> None:
        """The last rows no longer count; their slots still hold what they wrote."""
        self.steps.sequences.lengths[0] -= count
        del self.naive.rows[len(self.naive.rows) - count :]


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_naive_draft(case: str) -> None:
    pair = Pair(*CASES[case], has_biases=case in BIASED)
    pair.extend(13)
    feedback = pair.extend(6)
    pair.single_steps(4, *feedback)
    pair.reject(4)
    feedback = pair.extend(3)
    pair.single_steps(7, *feedback)
    pair.reject(7)
    pair.extend(8)


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_extension_in_any_chunks_gives_the_same_bits(kind: str) -> None:
    results = []
    for splits in ([20], [1] * 20, [8, 9, 3], [5, 2, 13]):
        pair = Pair(kind, {})
        aux, tokens, logits = pair.aux(20), pair.tokens(20), []
        for size in splits:
            done = int(pair.steps.sequences.lengths[0])
            hidden = pair.draft.combine_aux(aux[done : done + size])
            logits.append(pair.steps.step([(0, tokens[done : done + size])], [hidden])[0][0])
        results.append(torch.cat(logits))
    assert all(torch.equal(result, results[0]) for result in results[1:])


def outputs(kind: str, overrides: DraftOverrides, **fields: Any) -> torch.Tensor:
    """Logits of an extension and two single-row steps, from one checkpoint that has every optional tensor."""
    config = draft_config(kind, TARGET, overrides, **fields)
    tensors = random_draft(draft_config(kind, TARGET, DraftOverrides(fc_norm=True)))
    generator = torch.Generator().manual_seed(0)
    draft = build_draft(config, tensors)
    steps = DraftSteps(draft, [32])
    tokens = torch.randint(0, 96, (14,), generator=generator).tolist()
    states = 2 * torch.randn(7, 12, 64, generator=generator)
    aux = torch.cat([states[layer] for layer in config.aux_layer_ids], dim=1)
    logits, feedback = steps.step([(0, tokens[:12])], [draft.combine_aux(aux)])
    all_logits, last = [logits[0]], feedback[0][-1:]
    for token in tokens[12:]:
        logits, feedback = steps.step([(0, [token])], [last])
        last = feedback[0]
        all_logits.append(logits[0])
    return torch.cat(all_logits)


@pytest.mark.parametrize(
    ("kind", "overrides", "fields"),
    [
        ("mla", DraftOverrides(fc_norm=True), {}),
        ("mla", DraftOverrides(norm_output=True), {}),
        ("mla", DraftOverrides(), {"norm_before_residual": True}),
        ("mla", DraftOverrides(interleaved=False), {}),
        ("mla", DraftOverrides(rope_theta=10000.0), {}),
        ("mla", DraftOverrides(beta_fast=1.0), {}),
        ("mla", DraftOverrides(aux_layer_ids=(1, 2, 3)), {}),
        ("mha", DraftOverrides(fc_norm=True), {}),
        ("mha", DraftOverrides(norm_output=True), {}),
        ("mha", DraftOverrides(), {"norm_before_residual": True}),
        ("mha", DraftOverrides(interleaved=True), {}),
        ("mha", DraftOverrides(rope_theta=10000.0), {}),
        ("mha", DraftOverrides(aux_layer_ids=(1, 2, 3)), {}),
        ("mha", DraftOverrides(), {"sliding_window": 5}),
    ],
)
def test_every_flag_changes_the_output(kind: str, overrides: DraftOverrides, fields: dict[str, Any]) -> None:
    plain, toggled = outputs(kind, DraftOverrides()), outputs(kind, overrides, **fields)
    assert plain.isfinite().all()
    assert toggled.isfinite().all()
    assert (plain - toggled).abs().max() > 1e-2


def test_norm_output_changes_only_rows_that_are_fed_back() -> None:
    plain, toggled = outputs("mla", DraftOverrides()), outputs("mla", DraftOverrides(norm_output=True))
    assert torch.equal(plain[:12], toggled[:12])
    assert not torch.equal(plain[12], toggled[12]) and not torch.equal(plain[13], toggled[13])
