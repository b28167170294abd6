"""A client of the threaded engine that keeps every delta it gets, those after the final one too."""

import threading

from kimi_backend.types.request import TokenDelta
from support.waiting import PATIENCE_S


class RecordingClient:
    """Use it as the sink of `Engine.submit`."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.done = threading.Event()

    def __call__(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.done.set()

    def wait(self, timeout_s: float = PATIENCE_S) -> TokenDelta:
        """The final delta."""
        assert self.done.wait(timeout_s), "no final delta"
        return next(delta for delta in self.deltas if delta.finish_reason is not None)

    def check(self) -> None:
        """Call it when the engine has stopped: exactly one final delta, and nothing after it."""
        finals = [index for index, delta in enumerate(self.deltas) if delta.finish_reason is not None]
        assert finals == [len(self.deltas) - 1], f"final deltas at {finals} of {len(self.deltas)}"
        assert all((delta.stats is not None) == (delta.finish_reason is not None) for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)
