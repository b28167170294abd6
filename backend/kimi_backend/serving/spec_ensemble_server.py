"""`spec_ensemble`: requests in, the engine over both runners, responses out. CUDA-free, one process."""

import itertools
import logging
import os
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine, RequestHandle
from kimi_backend.engine.loop import SHUTTING_DOWN, Patience
from kimi_backend.errors import InvalidRequestError, KimiError
from kimi_backend.grammar.compiler import GrammarCompiler
from kimi_backend.processes import freeze_what_is_loaded, give_large_memory_back, is_alive
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving.aux_transfer import AuxTransfer, SemaphoreTransfer
from kimi_backend.serving.bls_models import BlsDraft, BlsTarget
from kimi_backend.serving.bytes_inputs import limit_decoding
from kimi_backend.serving.descriptions import model_parameters
from kimi_backend.serving.drain_file import DrainFile
from kimi_backend.serving.engine_lock import EngineLock, lock_of_this_server
from kimi_backend.serving.incoming import parameters_text, read_parameters, request_name
from kimi_backend.serving.metrics import MetricsPublisher
from kimi_backend.serving.request_lanes import Arrival, RequestLanes
from kimi_backend.serving.request_parser import RequestParser
from kimi_backend.serving.response_sender import ResponseSender
from kimi_backend.serving.runner_secret import read_secret
from kimi_backend.serving.start_probe import warn_of_wrong_draft
from kimi_backend.serving.triton_errors import forward_logs
from kimi_backend.spec_decode.policy import PolicyName
from kimi_backend.text.chat_template import load_chat_template
from kimi_backend.text.tokenizer import Tokenizer, load_tokenizer
from kimi_backend.types.request import FinishReason, GenerateRequest, RequestStats, TokenDelta

logger = logging.getLogger("kimi_backend.serving")

HANDSHAKE_PATIENCE_S = 5.0
"""A request that comes right after the server's start waits so long for the first answer of the runners."""
WATCH_S = 0.1
LAST_RESPONSES_S = 2.0
"""The responses of requests that are cut off are sent within it."""


def scheduler_settings(settings: ServingSettings) -> SchedulerSettings:
    """The engine's part of the server's settings."""
    return SchedulerSettings(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(settings.max_num_batched_tokens, settings.max_num_seqs),
        max_prompt_tokens_beside_decode=settings.max_prompt_tokens_beside_decode,
        max_queue_size=settings.max_queue_size,
        num_speculative_tokens=min(settings.num_speculative_tokens, settings.max_speculative_tokens),
        max_speculative_tokens=settings.max_speculative_tokens,
        proposer=settings.chosen_proposer,
        lookup_min_match=settings.lookup_min_match,
        lookup_memory_bytes=settings.lookup_bytes,
        lookup_pool_bytes=settings.lookup_pool_bytes,
        draft_max_positions=settings.draft_max_positions,
        speculation_policy=PolicyName(settings.speculation_policy),
        async_scheduling=settings.async_scheduling == "true",
    )


def make_parser(settings: ServingSettings) -> tuple[RequestParser, Any]:
    """The request parser and the tokenizer it uses."""
    folder = settings.tokenizer or settings.checkpoint
    if not folder:
        raise InvalidRequestError("setting checkpoint: empty, the folder of a checkpoint is needed")
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer)

    def encode_chat(messages: Any, *, tools: Any, template_kwargs: dict[str, Any], enough: float) -> list[int]:
        assert template is not None
        return template.render(messages, tools=tools, template_kwargs=template_kwargs, enough=enough).token_ids

    parser = RequestParser(tokenizer, None if template is None else encode_chat, settings.default_max_tokens)
    return parser, tokenizer


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _of_the_prompt(request: GenerateRequest) -> TokenDelta:
    """All that a request for no token gets; no model runs for it."""
    stats = RequestStats(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        max_tokens=0,
        queue_time_s=0.0,
        first_token_time_s=None,
        total_time_s=0.0,
        num_preemptions=0,
        seed=request.sampling.seed or 0,
        speculation=None,
    )
    return TokenDelta(request_id=request.request_id, token_ids=(), finish_reason=FinishReason.LENGTH, stats=stats)


class SpecEnsembleServer:
    """Takes the server's requests and answers each with one or more responses, the last of them final."""

    def __init__(self, settings: ServingSettings, pb_utils: Any, engine_lock: EngineLock, runner_secret: bytes) -> None:
        self._engine_lock = engine_lock
        self._pb = pb_utils
        self._settings = settings
        self._parser, self._tokenizer = make_parser(settings)
        tokenizer = self._tokenizer
        self._ids = itertools.count()
        self._handles: dict[str, Future[RequestHandle]] = {}
        """A request can end, or its client leave, before `submit` has returned its handle."""
        self._sender = ResponseSender(pb_utils, self._cancel, partial(_token_text, tokenizer))
        aux_transfer, semaphores = AuxTransfer(), SemaphoreTransfer()
        self._engine = Engine(
            BlsTarget(pb_utils, "kimi_target", aux_transfer, semaphores, secret=runner_secret),
            BlsDraft(pb_utils, "eagle3_draft", aux_transfer, semaphores, secret=runner_secret)
            if settings.draft
            else None,
            settings=scheduler_settings(settings),
            eos_token_ids=tokenizer.eos_token_ids,
            tokenizer=tokenizer,
            patience=Patience(target_s=settings.target_patience_s),
            grammars=GrammarCompiler(tokenizer),
        )
        self._metrics = MetricsPublisher(
            pb_utils, self._engine.statistics, settings.metrics_interval_s, lambda: self._sender.lag_s
        )
        self._drain_file = DrainFile(Path(settings.drain_file)) if settings.drain_file else None
        self._drains_since: float | None = None
        self._lanes = RequestLanes(self._start, self._refuse, settings.max_queue_size)
        self._has_started = False
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="kimi-watch", daemon=True).start()

    @classmethod
    def from_model_args(cls, args: dict[str, str]) -> "SpecEnsembleServer":
        """Read the settings and the tokenizer; the runners are met from the engine's thread."""
        import triton_python_backend_utils as pb_utils

        settings = ServingSettings.from_parameters(model_parameters(args), os.environ)
        forward_logs(pb_utils, settings.log_level)
        limit_decoding(pb_utils)
        give_large_memory_back()
        server = cls(settings, pb_utils, lock_of_this_server(), read_secret(os.environ))
        freeze_what_is_loaded()
        return server

    def accept(self, requests: list[Any]) -> None:
        """Put each request into a lane; one that has no room there is answered at once.

        The first one starts the engine. It calls the runners through the server, and a call that is under way before
        the server has seen `initialize` return ends the server's process (segmentation fault in 24.10).
        """
        for request in requests:
            sender = request.get_response_sender()
            request_id = f"{request_name(request)}#{next(self._ids)}"
            try:
                self._begin()
                self._lanes.put(Arrival.of(request_id, sender, request.inputs(), parameters_text(request)))
            except Exception as error:
                self._send_refusal(request_id, sender, error)

    def close(self) -> None:
        """Cancel what is live, send every final response, end the threads."""
        self._closed.set()
        self._end()

    def _end(self) -> None:
        self._lanes.close(SHUTTING_DOWN)
        self._engine.stop()  # before the wait: the ends of running requests need not wait for what is being read
        self._lanes.wait(LAST_RESPONSES_S)
        self._sender.close(LAST_RESPONSES_S)
        self._leave()
        if self._drain_file is not None and self._drain_file.limit_s is not None:
            self._drain_file.report(self._sender.num_live)

    def _leave(self) -> None:
        """Hand over to another engine. The metrics go first: they have the same names there, and one that is deleted
        after another of its name was made takes that one with it, which ends the server (24.10)."""
        self._metrics.close()
        self._engine_lock.release()

    def _begin(self) -> None:
        if not self._has_started:
            self._engine_lock.acquire(HANDSHAKE_PATIENCE_S)
            self._has_started = True
            self._engine.start()
            self._probe_at_start()

    def _start(self, arrival: Arrival) -> None:
        """Read a request and hand it to the engine, on its lane's thread."""
        self._engine.wait_until_ready(HANDSHAKE_PATIENCE_S)
        request_id, parameters = arrival.request_id, read_parameters(arrival.parameters)
        parsed = self._parser.parse(request_id, arrival.tensors, parameters, self._engine.max_prompt_tokens)
        self._engine.check(parsed.generate)
        echo = self._tokenizer.decode(parsed.generate.prompt_token_ids) if parsed.echo else ""
        sampling = parsed.generate.sampling
        if sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
            self._sender.register(request_id, arrival.sender, parsed, echo)
            self._sender.put(_of_the_prompt(parsed.generate))
            return
        handle = self._handles[request_id] = Future()
        self._sender.register(request_id, arrival.sender, parsed, echo)
        handle.set_result(self._engine.submit(parsed.generate, self._on_delta))

    def _refuse(self, arrival: Arrival, error: BaseException) -> None:
        self._handles.pop(arrival.request_id, None)
        self._send_refusal(arrival.request_id, arrival.sender, error)

    def _send_refusal(self, request_id: str, sender: Any, error: BaseException) -> None:
        self._metrics.refused(error.code if isinstance(error, KimiError) else KimiError.code)
        self._sender.refuse(request_id, sender, error)

    def _probe_at_start(self) -> None:
        settings = self._settings
        if settings.probe_at_start == "off" or not settings.draft or settings.synthetic_parts:
            return
        command = f"kimi probe {settings.checkpoint} --draft {settings.draft}"
        args = (self._engine, self._tokenizer, command)
        threading.Thread(target=warn_of_wrong_draft, args=args, name="kimi-start-probe", daemon=True).start()

    def _on_delta(self, delta: Any) -> None:
        if delta.finish_reason is not None:
            self._handles.pop(delta.request_id, None)
        if delta.stats is not None:
            self._metrics.finished(delta.stats)
        self._sender.put(delta)

    def _has_drained(self) -> bool:
        """Tell whether a drain was ordered, and no request is left or their time is over."""
        limit_s = None if self._drain_file is None else self._drain_file.limit_s
        if self._drain_file is None or limit_s is None:
            return False
        if self._drains_since is None:
            self._drains_since = time.monotonic()
            logger.info("draining: new requests are refused, live ones have %g s", limit_s)
            self._engine.begin_drain()
        num_left = self._lanes.num_waiting + self._sender.num_live  # in the order in which requests pass
        if num_left:  # none is reported when their last responses have been sent
            self._drain_file.report(num_left)
        return not num_left or time.monotonic() - self._drains_since >= limit_s

    def _cancel(self, request_id: str) -> None:
        handle = self._handles.get(request_id)
        if handle is not None:
            handle.add_done_callback(lambda submitted: submitted.result().cancel())

    def _watch(self) -> None:
        """Look for the drain file, for another engine that wants the lock, and whether the runners' processes live.

        The server itself takes a second to answer a call to a stub that has died; clients need not wait for that. And
        the draft may not be called for long, where drafting does not pay.
        """
        dead_target: int | None = None
        while not self._closed.wait(WATCH_S):
            if self._engine_lock.is_wanted:
                logger.info("another spec_ensemble takes over: live requests are cancelled, new ones refused")
            if self._engine_lock.is_wanted or self._has_drained():
                self._end()
                return
            target, draft = self._engine.target_process_id, self._engine.draft_process_id
            if target is not None and target != dead_target and not is_alive(target):
                dead_target = target
                self._engine.fail_live(f"runner kimi_target: its process {target} has died")
            if draft is not None and not is_alive(draft):
                self._engine.report_dead_draft(draft)
