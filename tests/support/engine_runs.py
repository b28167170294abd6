"""Runs an `EngineCore` over two models to the end and keeps what each request got."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kimi_backend.engine.commit import StepOutput
from kimi_backend.engine.core import EngineCore
from kimi_backend.engine.handshake import check_pair, check_runner, resolve
from kimi_backend.engine.runner_link import RunnerLink
from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.grammar.window import SequenceGrammar
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.sequence import Sequence as EngineSequence
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.lookup import LookupMemory, SequenceLookup
from kimi_backend.spec_decode.protocols import Draft, Target
from kimi_backend.types.grammar import Grammar
from kimi_backend.types.request import GenerateRequest
from support.scripted_models import connect


@dataclass
class Outcome:
    """Everything that one request got."""

    request: GenerateRequest
    sequence: EngineSequence
    token_ids: list[int] = field(default_factory=list)
    steps: list[StepOutput] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """(drafted, accepted) of each verify that carried draft tokens."""
        return [(s.num_draft_tokens, s.num_accepted) for s in self.steps if s.num_draft_tokens]


class FakeClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class EngineHarness:
    """A connected core, with requests added by hand and outputs sorted by request."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        settings: SchedulerSettings | None = None,
        eos_token_ids: Iterable[int] = (),
        compile_grammar: Callable[[Grammar], CompiledGrammar] | None = None,
    ) -> None:
        self._compile_grammar = compile_grammar
        self.clock = FakeClock()
        self.eos_token_ids = frozenset(eos_token_ids)
        connect(target, draft)
        target_link = RunnerLink(target, "target", self.clock)
        draft_link = None if draft is None else RunnerLink(draft, "draft", self.clock)
        target_description = target.describe()
        check_runner(target_description, "target")
        target_link.accept(target_description)
        draft_description = None
        if draft is not None and draft_link is not None:
            draft_description = draft.describe()
            check_runner(draft_description, "draft")
            check_pair(target_description, draft_description)
            draft_link.accept(draft_description)
        geometry = resolve(target_description, draft_description, settings or SchedulerSettings())
        self.core = EngineCore(target, draft, target_link, draft_link, geometry, self._emit, self.clock)
        self.outcomes: list[Outcome] = []
        self.lookup_memory = LookupMemory(geometry.settings.lookup_memory_bytes)
        self._draft = draft

    def add(self, request: GenerateRequest) -> Outcome:
        geometry = self.core.geometry
        room = geometry.max_model_len - len(request.prompt_token_ids)
        max_tokens = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
        k = request.num_speculative_tokens
        sequence = EngineSequence(
            request,
            uid=len(self.outcomes),
            seed=0 if request.sampling.seed is None else request.sampling.seed,
            arrival_s=self.clock(),
            num_speculative_tokens=geometry.settings.num_speculative_tokens if k is None else k,
            max_num_tokens=len(request.prompt_token_ids) + max_tokens,
            eos_token_ids=self.eos_token_ids,
            proposer=request.proposer or geometry.settings.proposer,
        )
        if sequence.proposer.uses_lookup:
            min_match = geometry.settings.lookup_min_match
            sequence.look_up_in(SequenceLookup.of(sequence.token_ids, min_match, self.lookup_memory))
        grammar = request.sampling.grammar
        if grammar is not None:
            assert self._compile_grammar is not None
            sequence.grammar = SequenceGrammar.of(grammar, self._compile_grammar(grammar), self.eos_token_ids)
        outcome = Outcome(request, sequence)
        self.outcomes.append(outcome)
        self.core.add(sequence)
        return outcome

    def step(self) -> bool:
        did_work = self.core.step()
        violation = getattr(self._draft, "violation", None)
        if violation is not None:
            raise violation
        if self.core.kv.target_pool.num_blocks < 500:  # it looks at every block
            self.core.kv.check_invariants()
        return did_work

    def run(self, max_steps: int = 100_000, each_step: Callable[[int], None] | None = None) -> None:
        """Step until nobody runs or waits."""
        for step in range(max_steps):
            if not self.core.scheduler.has_work:
                return
            if not self.step():
                self.clock.now += 0.5
            if each_step is not None:
                each_step(step)
        raise AssertionError(f"work left after {max_steps} steps")

    def _emit(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            outcome = self.outcomes[output.sequence.uid]
            assert not outcome.finishes, f"request {outcome.request.request_id} got an output after its last"
            outcome.token_ids += output.token_ids
            outcome.steps.append(output)
            if output.finish is not None:
                outcome.finishes.append(output.finish)


def generate(
    target: Target,
    draft: Draft | None,
    requests: Sequence[GenerateRequest],
    settings: SchedulerSettings | None = None,
    eos_token_ids: Iterable[int] = (),
) -> list[Outcome]:
    """Run all requests to their ends, together."""
    harness = EngineHarness(target, draft, settings, eos_token_ids)
    for request in requests:
        harness.add(request)
    harness.run()
    harness.core.kv.check_invariants()
    assert harness.core.kv.target_pool.num_held == 0
    assert harness.core.kv.draft_pool is None or harness.core.kv.draft_pool.num_held == 0
    return harness.outcomes
