"""Sequences that wait for their grammars to be compiled. Nobody else waits for them."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from kimi_backend.errors import InvalidRequestError
from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.grammar.window import SequenceGrammar
from kimi_backend.scheduler.sequence import Finish, Sequence
from kimi_backend.types.request import EndCause, FinishReason

Compiled = Future[CompiledGrammar]


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
        """Wait no longer; False if it does not wait here."""
        return self._waiting.pop(sequence.uid, None) is not None

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
    except (InvalidRequestError, CancelledError) as error:
        sequence.finish = Finish(FinishReason.ERROR, error=str(error), cause=EndCause.BAD_GRAMMAR)
