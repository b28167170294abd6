"""Outputs on their way to the emitter: waking its thread takes as long as planning a step, so it may wait until the
next step is on its way."""

from collections.abc import Callable

from kimi_backend.engine.commit import StepOutput

Emit = Callable[[list[StepOutput]], None]


class HeldOutputs:
    """Keeps the order. One thread at a time."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: list[StepOutput] = []

    def hold(self, outputs: list[StepOutput]) -> None:
        """Emit a step's outputs with the next `flush`; at once, where a client waits for its end or looks for one."""
        self.flush()
        if any(output.finish is not None or output.sequence.params.stop for output in outputs):
            self._emit(outputs)
        else:
            self._held = outputs

    def put(self, outputs: list[StepOutput]) -> None:
        """Emit at once, behind what is held."""
        self.flush()
        self._emit(outputs)

    def flush(self) -> None:
        """Emit what is held."""
        held, self._held = self._held, []
        if held:
            self._emit(held)
