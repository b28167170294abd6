"""Metrics of speculation: rounds, drafted and accepted tokens, the number of draft tokens in force."""

from collections.abc import Iterable

from kimi_backend.engine.statistics import EngineStatistics
from kimi_backend.serving.metric_kinds import Metric, MetricKind, counter, gauge, labelled
from kimi_backend.spec_decode.stats import PROPOSER_NAMES
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS, SpeculationStats

ACCEPT_LENGTH = "spec_accept_length"
_POSITIONS = tuple(map(str, range(MAX_SPECULATIVE_TOKENS)))
_PROPOSERS = tuple(PROPOSER_NAMES.values())
_NO_SPECULATION = SpeculationStats()


def _speculation(statistics: EngineStatistics) -> SpeculationStats:
    return statistics.totals.speculation or _NO_SPECULATION


def _by_proposer(statistics: EngineStatistics) -> Iterable[tuple[str, SpeculationStats]]:
    return statistics.totals.speculation_by_proposer.items()


def _looked_up(statistics: EngineStatistics) -> SpeculationStats:
    return statistics.totals.speculation_by_proposer.get(Proposer.LOOKUP.value, _NO_SPECULATION)


def _by_position(counts: tuple[int, ...]) -> dict[str, float]:
    return {str(position): count for position, count in enumerate(counts)}


SPECULATION: tuple[Metric, ...] = (
    counter(
        "spec_decode_num_drafts_total",
        "Rounds: verifies that carried at least one draft token.",
        lambda s: _speculation(s).num_spec_steps,
        "vllm:spec_decode_num_drafts_total",
    ),
    counter(
        "spec_decode_num_draft_tokens_total",
        "Draft tokens that were verified.",
        lambda s: _speculation(s).num_draft_tokens,
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    counter(
        "spec_decode_num_accepted_tokens_total",
        "Draft tokens that were kept.",
        lambda s: _speculation(s).num_accepted_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Rounds that kept the draft token at this position, counted from 0.",
        "position",
        _POSITIONS,
        lambda s: _by_position(_speculation(s).accepted_per_position),
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_draft_tokens_per_pos_total",
        "Rounds that proposed a token at this position, counted from 0.",
        "position",
        _POSITIONS,
        lambda s: _by_position(_speculation(s).drafted_per_position),
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_drafts_by_proposer_total",
        "The same rounds by whose tokens they verified: the draft's, or the text's own.",
        "proposer",
        _PROPOSERS,
        lambda s: {proposer: rounds.num_spec_steps for proposer, rounds in _by_proposer(s)},
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_draft_tokens_by_proposer_total",
        "Verified tokens by who had proposed them.",
        "proposer",
        _PROPOSERS,
        lambda s: {proposer: rounds.num_draft_tokens for proposer, rounds in _by_proposer(s)},
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_accepted_tokens_by_proposer_total",
        "Those of them that were kept.",
        "proposer",
        _PROPOSERS,
        lambda s: {proposer: rounds.num_accepted_draft_tokens for proposer, rounds in _by_proposer(s)},
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_lookup_num_draft_tokens_per_pos_total",
        "Rounds of looked-up tokens that had one at this position, counted from 0.",
        "position",
        _POSITIONS,
        lambda s: _by_position(_looked_up(s).drafted_per_position),
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_lookup_num_accepted_tokens_per_pos_total",
        "Those of them that kept it.",
        "position",
        _POSITIONS,
        lambda s: _by_position(_looked_up(s).accepted_per_position),
    ),
    gauge(
        "spec_decode_lookup_index_bytes",
        "Host memory of the indexes of all requests.",
        lambda s: s.lookup_bytes,
    ),
    counter(
        "spec_decode_lookup_refused_total",
        "Requests that were served without an index, for want of `lookup_memory_mib`.",
        lambda s: s.num_lookups_refused,
    ),
    labelled(
        MetricKind.COUNTER,
        "spec_decode_num_verifies_total",
        "Verifies of a sequence by the draft tokens they carried, 0 included.",
        "num_draft_tokens",
        tuple(map(str, range(MAX_SPECULATIVE_TOKENS + 1))),
        lambda s: _by_position(s.totals.num_draft_tokens_histogram),
    ),
    gauge(
        "spec_decode_num_chosen_tokens",
        "Draft tokens a round that the policy allows now; 0 while it lets nobody draft.",
        lambda s: s.num_chosen_draft_tokens,
    ),
    Metric(
        name=ACCEPT_LENGTH,
        kind=MetricKind.GAUGE,
        meaning="1 + accepted tokens a round, over the last 10 s that had a round; 0 before the first.",
        read=lambda s: {},
    ),
    gauge(
        "spec_decode_acceptance_alarm",
        "1 while first draft tokens are accepted hardly ever, or far less often than before; the log says why.",
        lambda s: float(s.acceptance_problem is not None),
    ),
    gauge(
        "spec_decode_is_on",
        "1 while the draft answers; 0 without a draft or while it is lost.",
        lambda s: float(s.is_speculating),
    ),
)
