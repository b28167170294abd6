"""The server's end: running requests end before anybody waits for what is being read."""

import threading
from typing import Any

import pytest

from kimi_backend.engine.loop import SHUTTING_DOWN
from kimi_backend.serving import spec_ensemble_server
from kimi_backend.serving.request_lanes import Arrival, RequestLanes
from kimi_backend.serving.spec_ensemble_server import SpecEnsembleServer
from support.fake_pb_utils import RecordingSender
from support.waiting import PATIENCE_S, wait_for


class Parts:
    """The parts of a server, over real lanes. The request that is being read is so until the engine has stopped."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.has_stopped = threading.Event()
        self.lanes = RequestLanes(self._read, lambda arrival, error: self.done.append(str(error)), most_waiting=4)

    def _read(self, arrival: Arrival) -> None:
        if self.has_stopped.wait(PATIENCE_S):
            self.done.append("read")

    def stop(self) -> None:
        self.done.append("running requests end")
        self.has_stopped.set()

    def close(self, *_: Any) -> None:
        self.done.append("closed")

    def release(self) -> None:
        self.done.append("the next engine may start")


def test_running_requests_end_before_what_is_being_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_ensemble_server, "LAST_RESPONSES_S", PATIENCE_S / 2)
    parts = Parts()
    server = SpecEnsembleServer.__new__(SpecEnsembleServer)
    server._lanes, server._drain_file, server._closed = parts.lanes, None, threading.Event()
    for name in ("_engine", "_sender", "_metrics", "_engine_lock"):
        setattr(server, name, parts)
    for name in ("first", "second"):
        parts.lanes.put(Arrival(request_id=name, sender=RecordingSender(), tensors={}, parameters="", num_bytes=1))
    wait_for(lambda: parts.lanes._short._is_reading)
    waited = parts.lanes.wait
    monkeypatch.setattr(parts.lanes, "wait", lambda timeout_s: (parts.done.append("wait"), waited(timeout_s)))
    server.close()
    first, *rest = parts.done
    assert first == "running requests end"
    assert sorted(rest[:3]) == sorted(["read", SHUTTING_DOWN, "wait"]), "all of them before the last responses are sent"
    assert rest[3:] == ["closed", "closed", "the next engine may start"]
