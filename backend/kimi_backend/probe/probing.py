"""Finds the settings that a draft was trained with: which ones get the most of its tokens accepted.

A draft that is served with the wrong aux layers, rotary pairing or norm flags still drafts, only worse, and nothing
fails. So the probe lets the target write a few texts greedily, keeps the states of every layer that a candidate
setting might read, and replays the rounds of speculative decoding with the draft loaded under each setting. The texts
do not depend on the draft, so the target runs once.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kimi_backend.config.draft_config import DraftOverrides, Eagle3DraftConfig
from kimi_backend.errors import ConfigError
from kimi_backend.probe.settings import ProbeSetting
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import AuxHandle, DraftPlan, Int32Array, RowPlan, SamplingPlan, TargetPlan

CLEAR_ERRORS = 3.0
"""Standard errors over prompts by which one setting must beat another to be called better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeText:
    """The target's text after one prompt."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    aux: torch.Tensor
    """[len(token_ids) - 1, len(layers) * hidden_size]: the R(j) of `ProbeTexts.layers` side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTexts:
    """Texts and the target's states along them."""

    layers: tuple[int, ...]
    """R(j) that were kept."""
    hidden_size: int
    texts: tuple[ProbeText, ...]

    def aux(self, text: int, layers: Sequence[int]) -> torch.Tensor:
        """[rows, len(layers) * hidden_size] of one text."""
        chunks = torch.split(self.texts[text].aux, self.hidden_size, dim=1)
        return torch.cat([chunks[self.layers.index(j)] for j in layers], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The acceptance of one setting."""

    setting: ProbeSetting
    lengths: tuple[float, ...]
    """Acceptance length of each text: 1 + mean draft tokens accepted a round."""

    @property
    def acceptance_length(self) -> float:
        return float(np.mean(self.lengths))

    def errors_above(self, other: "ProbeResult") -> float:
        """Paired standard errors over texts by which this setting accepts more; infinite if they never differ."""
        difference = np.subtract(self.lengths, other.lengths)
        if len(difference) < 2 or not difference.any():
            return 0.0 if not difference.any() else float("inf")
        error = float(difference.std(ddof=1)) / len(difference) ** 0.5
        return float(difference.mean() / error) if error else float("inf")


def write_texts(
    target: TargetRunner, layers: tuple[int, ...], prompts: Sequence[Sequence[int]], num_tokens: int
) -> ProbeTexts:
    """Let the target write `num_tokens` greedily after each prompt, one text after another.

    Args:
        target: captures `layers`, and has room for one sequence.
    Raises:
        ConfigError: a text of prompt and new tokens is longer than the runner takes.
    """
    described = target.describe()
    texts = []
    for prompt in prompts:
        if len(prompt) + num_tokens > described.max_model_len or not prompt:
            raise ConfigError(
                f"probe prompt: {len(prompt)} tokens and {num_tokens} new ones given, 1 to"
                f" {described.max_model_len} together (max_model_len) allowed"
            )
        texts.append(_write_text(target, list(prompt), num_tokens))
    return ProbeTexts(layers=layers, hidden_size=described.hidden_size, texts=tuple(texts))


def _write_text(target: TargetRunner, token_ids: list[int], num_tokens: int) -> ProbeText:
    described = target.describe()
    num_prompt_tokens, states, done = len(token_ids), list[torch.Tensor](), 0
    while len(token_ids) < num_prompt_tokens + num_tokens:
        rows = token_ids[done : done + described.max_num_batched_tokens]
        done += len(rows)
        is_last_chunk = done == len(token_ids)
        reply = target.launch(
            TargetPlan.given(
                step_id=done,
                rows=_rows(rows, [len(rows)], [done], [_block_ids(0, described.max_model_len, described.block_size)]),
                num_sampled_rows=np.array([int(is_last_chunk)], np.int32),
                sampling=SamplingPlan.plain(int(is_last_chunk)),
                num_logprobs=None,
                wants_aux=np.array([True]),
            )
        ).wait()
        assert isinstance(reply.aux.tensor, torch.Tensor), "the step wanted aux hidden states"
        states.append(reply.aux.tensor.cpu())
        if is_last_chunk:
            token_ids.append(int(reply.output_token_ids[0, 0]))
    return ProbeText(token_ids=tuple(token_ids), num_prompt_tokens=num_prompt_tokens, aux=torch.cat(states))


def replay(draft: DraftRunner, layers: Sequence[int], texts: ProbeTexts, num_draft_tokens: int) -> tuple[float, ...]:
    """Acceptance length of each text with greedy drafts of `num_draft_tokens`.

    Args:
        draft: has room for one sequence of each text's length and the drafts after it.
        layers: R(j) that it reads.
    """
    return tuple(
        _replay_text(draft, text, texts.aux(index, layers), num_draft_tokens) for index, text in enumerate(texts.texts)
    )


def _replay_text(draft: DraftRunner, text: ProbeText, aux: torch.Tensor, num_draft_tokens: int) -> float:
    """Rounds as in serving: extend over what is new, propose, keep what the text goes on with."""
    described = draft.describe()
    block_ids = _block_ids(0, described.max_model_len, described.block_size)
    rounds = accepted_total = 0
    done, end = 0, text.num_prompt_tokens  # rows extended; rows whose next token is known
    while end + num_draft_tokens < len(text.token_ids):
        for start in range(done, end, described.max_num_batched_tokens):
            stop = min(end, start + described.max_num_batched_tokens)
            is_last = stop == end
            plan = _draft_plan(text, aux, start, stop, num_draft_tokens if is_last else 0, block_ids)
            reply = draft.launch(plan).wait()
        assert reply.draft_token_ids is not None
        wanted = text.token_ids[end + 1 : end + 1 + num_draft_tokens]
        pairs = zip(reply.draft_token_ids[0].tolist(), wanted, strict=True)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rounds, accepted_total = rounds + 1, accepted_total + accepted
        done, end = end, end + accepted + 1
    return 1 + accepted_total / rounds if rounds else 1.0


def _draft_plan(
    text: ProbeText, aux: torch.Tensor, start: int, stop: int, num_proposals: int, block_ids: Int32Array
) -> DraftPlan:
    """Rows start to stop - 1: row p reads the aux states at p and the token at p + 1."""
    count = int(num_proposals > 0)
    return DraftPlan.given(
        step_id=stop,
        rows=_rows(text.token_ids[start + 1 : stop + 1], [stop - start], [stop], [block_ids]),
        aux=AuxHandle(tensor=aux[start:stop]),
        aux_rows=np.arange(stop - start, dtype=np.int64),
        num_proposals=np.array([num_proposals], np.int32),
        sampling=SamplingPlan.plain(count),
        output_index=np.full(count, stop + 1, np.int64),
    )


def _rows(token_ids: Sequence[int], query_lens: list[int], seq_lens: list[int], block_ids: list[Int32Array]) -> RowPlan:
    return RowPlan(
        token_ids=np.array(token_ids, np.int32),
        query_lens=np.array(query_lens, np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        block_table=np.stack(block_ids),
    )


def _block_ids(first: int, num_tokens: int, block_size: int) -> Int32Array:
    return np.arange(first, first - (-num_tokens // block_size), dtype=np.int32)


LoadDraft = Callable[[DraftOverrides], DraftRunner]


def probe(
    settings: Sequence[ProbeSetting],
    config: Eagle3DraftConfig,
    load_draft: LoadDraft,
    texts: ProbeTexts,
    num_draft_tokens: int,
) -> Iterator[ProbeResult]:
    """Measure each setting in turn; one draft is in memory at a time.

    Args:
        load_draft: loads the draft's file under overrides.
    """
    for setting in settings:
        layers = setting.overrides.aux_layer_ids or config.aux_layer_ids
        lengths = replay(load_draft(setting.overrides), layers, texts, num_draft_tokens)
        yield ProbeResult(setting=setting, lengths=lengths)


def verdict(results: Sequence[ProbeResult]) -> tuple[ProbeResult, list[ProbeResult]]:
    """The setting to believe, and the others that the texts do not tell apart from the best.

    Of those that the best is not clearly better than, it is the one that changes least of what the file says: a few
    texts never decide between near equals. The others follow by the same rule.
    """
    best = max(results, key=lambda result: result.acceptance_length)
    near = [result for result in results if result is best or best.errors_above(result) < CLEAR_ERRORS]
    chosen, *rivals = sorted(near, key=lambda result: (result.setting.num_overrides, -result.acceptance_length))
    return chosen, rivals


def ranking(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    """All settings as the texts rank them: the one to believe, its rivals, then what is clearly worse by acceptance."""
    chosen, rivals = verdict(results)
    believed = [chosen, *rivals]
    worse = [result for result in results if not any(result is near for near in believed)]
    return believed + sorted(worse, key=lambda result: -result.acceptance_length)
