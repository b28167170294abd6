"""Engines over scripted runners with their threads, and clients that check what they got."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from kimi_backend.engine.engine import Engine
from kimi_backend.types.plan import TargetPlan
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.recording_client import RecordingClient
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedPending, ScriptedTarget, connect, describe
from support.waiting import PATIENCE_S

VOCAB = 32
SCRIPT = LogitScript(VOCAB, scales=(3.0, 8.0))


class Client(RecordingClient):
    """Checked when its test has ended."""

    all_of_test: ClassVar[list["Client"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.all_of_test.append(self)


class SlowTarget(ScriptedTarget):
    """Takes its time, or waits for a gate."""

    step_s = 0.0
    gate: threading.Event | None = None
    num_free_steps = 0
    """The steps that pass without a gate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_held = threading.Event()

    def launch(self, plan: TargetPlan) -> ScriptedPending:
        self._pause()
        return super().launch(plan)

    def _pause(self) -> None:
        time.sleep(self.step_s)
        if self.gate is not None and self.num_steps >= self.num_free_steps:
            self.is_held.set()
            self.gate.wait(PATIENCE_S)


def make_target(**changes: object) -> SlowTarget:
    return SlowTarget(describe("target", SCRIPT, **changes), SCRIPT)


def make_draft(agreement: float = 0.8, **changes: object) -> ScriptedDraft:
    return ScriptedDraft(describe("draft", SCRIPT, **changes), SCRIPT, agreement)


def request(prompt: tuple[int, ...] = (1, 2, 3), request_id: str = "r", **sampling: object) -> GenerateRequest:
    params: dict[str, object] = {"seed": 7, "max_tokens": 20}
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**(params | sampling)),  # type: ignore[arg-type]
    )


def ready(engine: Engine) -> Engine:
    engine.wait_until_ready(PATIENCE_S)
    return engine


@contextmanager
def started_engines() -> Iterator[Callable[..., Engine]]:
    """Gives what starts an engine; stops all at the end and checks every client."""
    engines = []
    Client.all_of_test.clear()

    def make(target: ScriptedTarget, draft: ScriptedDraft | None = None, **kwargs: object) -> Engine:
        connect(target, draft)
        engine = Engine(target, draft, **kwargs)  # type: ignore[arg-type]
        engines.append(engine)
        engine.start()
        return engine

    yield make
    for engine in engines:
        engine.stop()
    for client in Client.all_of_test:
        if client.deltas:
            client.check()
