"""Sends responses from a thread of its own, so that a slow send never holds up the engine.

Sending costs about 0.2 ms of the Python backend. While one request's response is on its way, what the others'
steps add is kept, and goes out merged at their next turn: at low load every step is sent at once, at high load fewer,
longer responses leave. Nothing is lost or reordered, and each request gets exactly one final response.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kimi_backend.serving.request_parser import ParsedRequest
from kimi_backend.serving.responses import ResponseBuilder, merge_deltas
from kimi_backend.serving.triton_errors import error_response
from kimi_backend.types.request import EndCause, FinishReason, TokenDelta

logger = logging.getLogger("kimi_backend.serving")

CANCEL_POLL_S = 0.02
POLLS_A_ROUND = 4
"""A request is asked at least once in so many polls: asking is a message to the server and an answer."""
MOST_POLLED_AT_ONCE = 4
"""The most requests that are all asked every time."""


@dataclass(slots=True)
class _Live:
    """A request whose final response has not been sent."""

    sender: Any
    parsed: ParsedRequest
    echo: str = ""
    pending: list[TokenDelta] = field(default_factory=list)
    is_first: bool = True
    is_cancelled: bool = False
    pending_since_s: float = 0.0
    """The time when the first of `pending` came; it counts while the request is ready."""
    is_being_sent: bool = False
    """True while it is on the thread of long responses; what comes later waits for the end of that."""
    asked: int = 0
    """The time when it was last asked whether its client has left; 0: never."""


class ResponseSender:
    """The way of token deltas to the clients, and of cancellations back to the engine."""

    def __init__(self, pb_utils: Any, cancel: Callable[[str], None], token_text: Callable[[int], str] = str) -> None:
        """
        Args:
            cancel: takes the id of a request whose client has left.
            token_text: of a token alone, as log-probabilities show it.
        """
        self._pb = pb_utils
        self._cancel = cancel
        self._builder = ResponseBuilder(pb_utils, token_text)
        self._live: dict[str, _Live] = {}
        self._ready: dict[str, None] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._next_poll_s = 0.0
        self._num_asked = 0
        self._long = ThreadPoolExecutor(1, "long-responses")
        """Makes the responses that have a whole prompt's scores: others would wait for them."""
        self._thread = threading.Thread(target=self._run, name="response-sender", daemon=True)
        self._thread.start()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def lag_s(self) -> float:
        """Age of the oldest output that is ready and has not been sent."""
        with self._changed:
            since = [live.pending_since_s for key in self._ready if (live := self._live.get(key)) is not None]
        return time.monotonic() - min(since) if since else 0.0

    def register(self, request_id: str, sender: Any, parsed: ParsedRequest, echo: str = "") -> None:
        """Take charge of a request's responses, before any delta of it can come.

        Args:
            echo: what the first response's text begins with.
        """
        with self._changed:
            self._live[request_id] = _Live(sender, parsed, echo)
            self._changed.notify()  # an idle thread must begin to look for cancellations

    def refuse(self, request_id: str | None, sender: Any, error: BaseException) -> None:
        """End a request by an error that came before its first delta."""
        with self._changed:
            if request_id is not None:
                self._live.pop(request_id, None)
        self._send(sender, error_response(self._pb, error), is_final=True)

    def put(self, delta: TokenDelta) -> None:
        """Queue a delta; called from the engine's emitter, returns at once."""
        with self._changed:
            live = self._live.get(delta.request_id)
            if live is None:
                return
            if not live.pending:
                live.pending_since_s = time.monotonic()
            live.pending.append(delta)
            if live.parsed.stream or delta.finish_reason is not None:
                self._ready[delta.request_id] = None
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Send what is left, then stop. Requests still alive afterwards have had no final delta from the engine."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        self._long.shutdown()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._ready and not self._has_ended:
                    self._changed.wait(CANCEL_POLL_S if self._live else None)
                if self._has_ended:
                    return
                turn = list(self._ready)
                self._ready.clear()
            for request_id in turn:
                self._send_pending(request_id)
            self._poll_cancellations()

    @property
    def _has_ended(self) -> bool:
        return self._is_closing and not self._ready and not any(live.is_being_sent for live in self._live.values())

    def _send_pending(self, request_id: str) -> None:
        with self._changed:
            live = self._live.get(request_id)
            if live is None or not live.pending or live.is_being_sent:
                return  # what made it ready left with an earlier turn: it came while that turn was being sent
            delta = merge_deltas(live.pending)
            live.pending.clear()
            live.is_being_sent = delta.prompt_scores is not None
            if delta.finish_reason is not None and not live.is_being_sent:
                del self._live[request_id]
        if live.is_being_sent:
            self._long.submit(self._send_long, request_id, live, delta)
        else:
            self._send_or_fail(request_id, live, delta)

    def _send_long(self, request_id: str, live: _Live, delta: TokenDelta) -> None:
        self._send_or_fail(request_id, live, delta)
        with self._changed:
            live.is_being_sent = False
            if delta.finish_reason is not None:
                self._live.pop(request_id, None)
            elif live.pending and (live.parsed.stream or live.pending[-1].finish_reason is not None):
                self._ready[request_id] = None
            self._changed.notify()

    def _send_or_fail(self, request_id: str, live: _Live, delta: TokenDelta) -> None:
        try:
            self._send_delta(live, delta, delta.finish_reason is not None)
        except Exception as error:
            # The response could not be built: the client still needs its end.
            self._send(live.sender, error_response(self._pb, error), is_final=True)
            with self._changed:
                self._live.pop(request_id, None)
            self._cancel(request_id)

    def _send_delta(self, live: _Live, delta: TokenDelta, is_final: bool) -> None:
        prompt = live.parsed.generate.prompt_token_ids
        if live.is_first and live.echo:
            delta = dataclasses.replace(delta, text=live.echo + delta.text)
        response = self._builder.build(
            delta,
            num_input_tokens=len(prompt) if live.is_first else 0,
            return_token_ids=live.parsed.return_token_ids,
            with_logprobs=live.parsed.generate.sampling.logprobs is not None,
            prompt_token_ids=prompt if live.is_first and live.parsed.return_token_ids else (),
            return_control_offsets=live.parsed.return_control_offsets,
            begins_thinking=live.parsed.begins_thinking if live.is_first else None,
            scored_prompt=prompt,
        )
        live.is_first = False
        if not self._ends_by_error(delta):
            self._send(live.sender, response, is_final)
            return
        if delta.token_ids and live.parsed.stream:
            self._send(live.sender, response, is_final=False)
        self._send(live.sender, self._builder.build_error(delta), is_final=True)

    def _ends_by_error(self, delta: TokenDelta) -> bool:
        """A deadline or a client's own cancellation is a normal end; a failure or a shutdown is not."""
        if delta.finish_reason is FinishReason.CANCELLED:
            return delta.cause is EndCause.SHUTDOWN
        return delta.finish_reason is FinishReason.ERROR

    def _send(self, sender: Any, response: Any, is_final: bool) -> None:
        flags = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        try:
            sender.send(response, flags=flags)
        except self._pb.TritonModelException as error:
            logger.warning("a response could not be sent: %s", error)

    def _poll_cancellations(self) -> None:
        now = time.monotonic()
        if now < self._next_poll_s:
            return
        self._next_poll_s = now + CANCEL_POLL_S
        for request_id, live in self._next_to_ask():
            if live.sender.is_cancelled():
                live.is_cancelled = True
                self._cancel(request_id)

    def _next_to_ask(self) -> list[tuple[str, _Live]]:
        """Some of the live requests, those that were not asked for the longest time."""
        with self._changed:
            running = [(i, live) for i, live in self._live.items() if not live.is_cancelled]
        count = max(MOST_POLLED_AT_ONCE, -(-len(running) // POLLS_A_ROUND))
        if len(running) <= count:
            return running
        running.sort(key=lambda item: item[1].asked)
        for _, live in running[:count]:
            self._num_asked += 1
            live.asked = self._num_asked
        return running[:count]
