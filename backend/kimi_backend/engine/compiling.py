"""Sequences that wait for their grammars to be compiled. Nobody else waits for them."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from kimi_backend.errors import InvalidRequestError
from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.grammar.window import SequenceGrammar
from kimi_backend.scheduler.sequence import Finish, Sequence
from kimi_backend.types.request import EndCause, FinishReason

Compiled = Future[CompiledGrammar]

logger = logging.getLogger("kimi_backend.engine")


class CompilingSequences:
    """Owned by the engine's thread; others only say that something is compiled."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called on any thread when something is compiled."""
        self._wake = wake
        self._waiting: dict[int, tuple[Sequence, Compiled]] = {}
        self._done: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_news(self) -> bool:
        return bool(self._done)

    def add(self, sequence: Sequence, compiled: Compiled) -> None:
        """Let a sequence wait for its grammar."""
        self._waiting[sequence.uid] = sequence, compiled
        compiled.add_done_callback(lambda _: self._note(sequence.uid))

    def remove(self, sequence: Sequence) -> bool:
        """Wait no longer, so that nothing is compiled for nobody; False if it does not wait here."""
        waiting = self._waiting.pop(sequence.uid, None)
        if waiting is None:
            return False
        waiting[1].cancel()
        return True

    def take(self) -> list[Sequence]:
        """Those that wait no longer: each has its grammar, or a `finish` where that is none."""
        taken = []
        while self._done:
            waiting = self._waiting.pop(self._done.popleft(), None)
            if waiting is not None:
                _begin(*waiting)
                taken.append(waiting[0])
        return taken

    def _note(self, uid: int) -> None:
        self._done.append(uid)
        self._wake()


def _begin(sequence: Sequence, compiled: Compiled) -> None:
    grammar = sequence.params.grammar
    assert grammar is not None
    try:
        sequence.grammar = SequenceGrammar.of(grammar, compiled.result(), sequence.stop_token_ids)
    except InvalidRequestError as error:
        sequence.finish = Finish(FinishReason.ERROR, error=str(error), cause=EndCause.BAD_GRAMMAR)
    except Exception as error:  # such as a process that cannot be started: this request's end, nobody else's
        logger.exception("a grammar could not be compiled")
        message = f"its grammar could not be compiled: {type(error).__name__}: {error}"
        sequence.finish = Finish(FinishReason.ERROR, error=message, cause=EndCause.ENGINE_FAILED)
