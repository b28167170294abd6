"""The engine as its users see it: submit requests from any thread, get deltas on another, stop it once."""

import itertools
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kimi_backend.cache.hash_chain import HashChain
from kimi_backend.engine.handshake import Geometry
from kimi_backend.engine.loop import EngineLoop, Patience
from kimi_backend.engine.request_output import DeltaSink, NoText, OutputText, RequestOutput
from kimi_backend.engine.statistics import EngineState, EngineStatistics, take_statistics
from kimi_backend.errors import CapacityError, InvalidRequestError
from kimi_backend.grammar.matcher import CompiledGrammar, GrammarSource
from kimi_backend.scheduler.admission import AdmissionLimits, check_request
from kimi_backend.scheduler.sequence import Finish, Sequence
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.lookup import LookupMemory, SequenceLookup
from kimi_backend.spec_decode.protocols import Draft, Target
from kimi_backend.text.text_stream import TextStream
from kimi_backend.text.tokenizer import Tokenizer
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest
from kimi_backend.types.step_costs import StepCosts

SEED_BITS = 53
"""The bits of a seed that the engine picks: it is reported in JSON, where larger integers lose their low bits."""
DRAIN_POLL_S = 0.005
READY_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """A submitted request."""

    request_id: str
    seed: int
    """The request's own, or the one that was picked for it."""
    cancel_with: Callable[[str], None]

    def cancel(self, reason: str = "cancelled by the client") -> None:
        """Ask for its end; noticed within one step or 50 ms, whichever is longer. Harmless after its end."""
        self.cancel_with(reason)


class Engine:
    """Serves requests over one target and, if there is one, its draft.

    Every request that `submit` takes gets exactly one final delta: when it ends by itself, is cancelled, exceeds its
    deadline, and when the engine drains, stops or fails.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        *,
        settings: SchedulerSettings | None = None,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        patience: Patience | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        """
        Args:
            tokenizer: None for token ids only; stop strings need one.
            grammars: compiles those of requests; None: a request with one is refused. Closed with the engine.
        """
        self._settings = settings or SchedulerSettings()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._uids = itertools.count()
        self._lookup_memory = LookupMemory(self._settings.lookup_memory_bytes)
        self._loop = EngineLoop(target, draft, self._settings, patience or Patience())

    def start(self) -> None:
        """Begin with the handshake, in the background."""
        self._loop.start()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Block until requests are taken. While the runners time their steps, which ends by itself, the time stands.

        Raises:
            ModelUnavailableError: not within the time, or the runners do not fit; says why.
        """
        end_s = time.monotonic() + timeout_s
        with self._loop.changed:
            while self._loop.state is EngineState.STARTING and (time.monotonic() < end_s or self._loop.is_timing_steps):
                self._loop.changed.wait(READY_POLL_S)
        self._loop.require_ready()

    @property
    def step_costs(self) -> dict[str, StepCosts]:
        """See `SpeculationPolicy.step_costs`.

        Raises:
            CapacityError, ModelUnavailableError: as `submit`.
        """
        return self._loop.require_ready().scheduler.policy.step_costs

    def submit(self, request: GenerateRequest, sink: DeltaSink) -> RequestHandle:
        """Take a request; its deltas go to `sink` on the emitter thread. From any thread.

        Raises:
            InvalidRequestError: the request can never be served; names field, value and what is allowed.
            CapacityError: the queue is full or the engine shuts down; ModelUnavailableError: a runner is missing.
        """
        geometry = self._loop.require_ready().geometry
        self.check(request)
        self._check_compiler(request)
        sequence = self._make_sequence(request, geometry)
        output = RequestOutput(
            sequence,
            self._make_text(request),
            sink,
            geometry.synthetic_parts,
            geometry.settings.speculation_policy.value,
            self._loop.acceptance_problem,
            self.step_costs if request.return_step_costs else None,
        )
        with self._loop.changed:
            core = self._loop.require_ready()
            num_waiting = self._loop.num_newcomers + len(core.scheduler.waiting)
            if num_waiting >= self._settings.max_queue_size:
                raise CapacityError(
                    f"{num_waiting} requests are waiting, at most {self._settings.max_queue_size} may; try later"
                )
            # Not before it has a place in the queue: what is refused leaves nothing to compile.
            compiled = self._compiled(request, geometry)
            self._loop.emitter.register(output)
            self._loop.add(sequence, compiled)
        return RequestHandle(request.request_id, sequence.seed, lambda reason: self._loop.cancel(sequence, reason))

    def check(self, request: GenerateRequest) -> None:
        """Pass silently if the request can be served; raises as `submit`."""
        limits = _limits(self._loop.require_ready().geometry, self._eos_token_ids)
        check_request(request, limits, self._settings)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that `submit` takes.

        Raises:
            CapacityError: as `submit`.
        """
        return _limits(self._loop.require_ready().geometry, self._eos_token_ids).max_prompt_tokens

    @property
    def target_process_id(self) -> int | None:
        """The process of the target that was last met; None before, or when it runs in this one."""
        return self._loop.target_link.process_id

    @property
    def draft_process_id(self) -> int | None:
        """The process of the draft, in the same way."""
        return None if self._loop.draft_link is None else self._loop.draft_link.process_id

    def report_dead_draft(self, process_id: int) -> None:
        """Speculation goes off though nobody calls the draft; does nothing if another process serves it by now."""
        if self._loop.draft_link is not None:
            self._loop.draft_link.report_death(process_id)

    def fail_live(self, problem: str) -> None:
        """End every live request by an error now, though the engine's thread may be waiting for a dead target."""
        finish = Finish(FinishReason.ERROR, error=problem, cause=EndCause.TARGET_LOST)
        self._loop.emitter.finish_all(finish, tells_engine=True)

    def begin_drain(self) -> None:
        """Take no more requests; the live ones go on."""
        with self._loop.changed:
            if self._loop.state is not EngineState.CLOSED:
                self._loop.state = EngineState.DRAINING

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests, wait for the live ones, then stop. False if some had to be cancelled."""
        self.begin_drain()
        end_s = time.monotonic() + timeout_s
        while self._loop.emitter.num_live and time.monotonic() < end_s:
            time.sleep(DRAIN_POLL_S)
        is_clean = self._loop.emitter.num_live == 0
        self.stop()
        return is_clean

    def stop(self) -> None:
        """Cancel what is live and end both threads. May be called twice."""
        self._loop.stop()
        if self._grammars is not None:
            self._grammars.close()

    def statistics(self) -> EngineStatistics:
        """A snapshot, from any thread."""
        loop = self._loop
        statistics = take_statistics(loop.state, loop.problem, loop.num_newcomers, loop.core, loop.emitter.totals())
        memory = self._lookup_memory
        return replace(
            statistics,
            acceptance_problem=loop.acceptance_problem,
            lookup_bytes=memory.num_bytes,
            num_lookups_refused=memory.num_refused,
        )

    def _check_compiler(self, request: GenerateRequest) -> None:
        grammar = request.sampling.grammar
        if grammar is not None and (self._grammars is None or not self._eos_token_ids):
            missing = "compiler of grammars" if self._grammars is None else "end-of-sequence token"
            raise InvalidRequestError(f"{grammar.field}: not supported here: there is no {missing}")

    def _compiled(self, request: GenerateRequest, geometry: Geometry) -> "Future[CompiledGrammar] | None":
        grammar = request.sampling.grammar
        if grammar is None or self._grammars is None:
            return None
        return self._grammars.request(grammar, geometry.vocab_size)

    def _make_sequence(self, request: GenerateRequest, geometry: Geometry) -> Sequence:
        """All work that grows with the prompt is done here, on the caller's thread."""
        params, k = request.sampling, request.num_speculative_tokens
        num_prompt, max_model_len = len(request.prompt_token_ids), geometry.max_model_len
        max_num_tokens = max_model_len if params.max_tokens is None else num_prompt + params.max_tokens
        sequence = Sequence(
            request,
            uid=next(self._uids),
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            arrival_s=time.monotonic(),
            num_speculative_tokens=self._settings.largest_k if k is None else k,
            max_num_tokens=min(max_num_tokens, max_model_len),
            eos_token_ids=self._eos_token_ids,
            proposer=request.proposer or self._settings.proposer,
        )
        if sequence.proposer.uses_lookup and sequence.most_draft_tokens:
            min_match = self._settings.lookup_min_match
            sequence.look_up_in(SequenceLookup.of(sequence.token_ids, min_match, self._lookup_memory))
        if self._settings.enable_prefix_cache:
            sequence.chain = HashChain(geometry.block_size, request.cache_salt)
            sequence.chain.extend(sequence.token_ids, (num_prompt - 1) // geometry.block_size)
        return sequence

    def _make_text(self, request: GenerateRequest) -> OutputText:
        params = request.sampling
        if self._tokenizer is None:
            if params.stop:
                raise InvalidRequestError(
                    f"stop: {len(params.stop)} strings given, none is allowed without a tokenizer"
                )
            return NoText()
        return TextStream(
            self._tokenizer,
            params.stop,
            include_stop=params.include_stop_in_output,
            skip_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            with_offsets=request.return_token_origins,
        )


def _limits(geometry: Geometry, eos_token_ids: frozenset[int]) -> AdmissionLimits:
    return AdmissionLimits(
        vocab_size=geometry.vocab_size,
        max_model_len=geometry.max_model_len,
        max_sequence_slots=geometry.num_target_blocks * geometry.block_size,
        eos_token_ids=eos_token_ids,
    )
