"""The watchdog's decisions, over processes and a server of the test's own."""

import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_backend.hosting import watchdog
from kimi_backend.hosting.watchdog import (
    CONFIRM_S,
    ORPHAN_ENDS_WITHIN_S,
    POLL_S,
    RELOAD_PAUSES_S,
    RESCAN_S,
    RUNNER_STOPPED_S,
    STOPPED_S,
    Watchdog,
    watch_command,
)

SERVER, PARENT = 10, 11


class Stub:
    def __init__(self, model: str, pid: int, state: str = "S", *, is_orphan: bool = False) -> None:
        self.model, self.pid, self.state, self.is_orphan = model, pid, state, is_orphan


class World:
    """Processes by id, a server's API, and everything that the watchdog does to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = {SERVER, PARENT}
        self.stubs: list[Stub] = []
        self.ready: dict[str, bool | None] = {}
        self.signals: list[tuple[int, int]] = []
        self.said: list[str] = []
        self.slept: list[float] = []
        self.reloaded: list[str] = []
        self.swept: list[str] = []
        self.scans: list[str] = []
        self.looks_at_memory: list[float] = []
        self.load_fails = False
        self.server_ends_after: int | None = None
        monkeypatch.setattr(watchdog, "is_alive", self.is_alive)
        monkeypatch.setattr(watchdog, "find_stubs", lambda prefix: self.scans.append(prefix) or list(self.stubs))
        monkeypatch.setattr(watchdog, "sweep_regions", self.swept.append)
        memory = SimpleNamespace(look=self.looks_at_memory.append)
        monkeypatch.setattr(watchdog, "SharedMemoryWatch", lambda prefix, say: memory)
        monkeypatch.setattr(watchdog.os, "kill", self.kill)
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=self.slept.append, monotonic=lambda: 0.0))
        monkeypatch.setattr(watchdog, "threading", SimpleNamespace(Thread=self.thread))
        api: Any = self
        self.dog = Watchdog(SERVER, PARENT, "kimi_1_", api, self.said.append)

    def thread(self, target: Any, args: tuple[Any, ...], daemon: bool) -> Any:
        assert daemon
        return SimpleNamespace(start=lambda: target(*args))

    def is_alive(self, pid: int) -> bool:
        if pid == SERVER and self.server_ends_after is not None:
            self.server_ends_after -= 1
            return self.server_ends_after >= 0
        return pid in self.alive

    def kill(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))
        raise ProcessLookupError

    def is_ready(self, model: str) -> bool | None:
        return self.ready.get(model, True)

    def reload(self, model: str) -> None:
        self.reloaded.append(model)
        if self.load_fails:
            raise OSError("refused")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def die(world: World, stub: Stub, now: float) -> None:
    """Have the watchdog see the process, and then that it has gone."""
    world.stubs = [stub]
    world.dog.step(now)
    world.stubs, stub.state = [], ""
    world.dog.step(now + RESCAN_S)
    world.dog.step(now + RESCAN_S + CONFIRM_S)


def test_a_runner_is_loaded_again_later_each_time(world: World) -> None:
    for number, pause_s in enumerate([*RELOAD_PAUSES_S, RELOAD_PAUSES_S[-1]]):
        die(world, Stub("kimi_target", 20 + number), 10.0 * number)
        assert len(world.reloaded) == number + 1
        assert world.slept[-1] == pause_s
        assert world.said[-2:] == [
            f"kimi_target: its process {20 + number} has died: the model is loaded again in {pause_s:g} s",
            "kimi_target: loaded again",
        ]
    die(world, Stub("eagle3_draft", 40), 900.0)
    assert (world.reloaded[-1], world.slept[-1]) == ("eagle3_draft", RELOAD_PAUSES_S[0])
    assert world.signals == []


def test_a_process_is_dead_only_after_a_while(world: World) -> None:
    stub = Stub("kimi_target", 20)
    world.stubs = [stub]
    world.dog.step(0.0)
    world.stubs, stub.state = [], ""
    world.dog.step(0.1)
    world.dog.step(0.1 + CONFIRM_S - 0.01)
    assert world.reloaded == []
    world.dog.step(0.1 + CONFIRM_S)
    world.dog.step(9.0)
    assert world.reloaded == ["kimi_target"]


def test_a_load_that_fails_is_told_and_tried_with_the_next_death(world: World) -> None:
    world.load_fails = True
    for number in range(2):
        die(world, Stub("kimi_target", 20 + number), 10.0 * number)
        assert world.said[-1] == "kimi_target: cannot be loaded again: refused"
    assert len(world.reloaded) == 2


@pytest.mark.parametrize("is_ready", [False, None])
def test_a_model_that_is_unloaded_stays_so(world: World, is_ready: bool | None) -> None:
    world.ready["kimi_target"] = is_ready
    die(world, Stub("kimi_target", 20), 0.0)
    assert (world.reloaded, world.signals, world.said) == ([], [], [])


def test_a_model_that_has_another_process_is_left_alone(world: World) -> None:
    dead = Stub("kimi_target", 20)
    world.stubs = [dead]
    world.dog.step(0.0)
    world.stubs, dead.state = [Stub("kimi_target", 21)], ""
    world.dog.step(RESCAN_S)
    world.dog.step(RESCAN_S + CONFIRM_S)
    assert world.reloaded == []


def test_without_the_orchestrator_the_server_is_ended(world: World) -> None:
    die(world, Stub("spec_ensemble", 20), 0.0)
    assert (world.signals, world.reloaded) == ([(SERVER, signal.SIGKILL)], [])
    assert "spec_ensemble: its process 20 has died" in world.said[0]


@pytest.mark.parametrize(("model", "limit_s"), [("spec_ensemble", STOPPED_S), ("eagle3_draft", RUNNER_STOPPED_S)])
def test_a_process_that_is_stopped_for_too_long_is_killed(world: World, model: str, limit_s: float) -> None:
    stub = Stub(model, 20, "T")
    world.stubs = [stub]
    world.dog.step(0.0)
    world.dog.step(limit_s - 0.01)
    stub.state = "S"
    world.dog.step(limit_s)
    stub.state = "T"
    world.dog.step(limit_s + 1.0)
    world.dog.step(2 * limit_s + 0.99)
    assert world.signals == []
    world.dog.step(2 * limit_s + 1.0)
    assert world.signals == [(20, signal.SIGKILL)]
    assert world.said == [f"{model}: its process 20 is stopped for {limit_s:g} s: it is killed"]


def test_stubs_and_memory_are_looked_for_once_in_a_while(world: World) -> None:
    for now in (0.0, RESCAN_S - 0.01, RESCAN_S, 1.5 * RESCAN_S, 2 * RESCAN_S):
        world.dog.step(now)
    assert world.looks_at_memory == [0.0, RESCAN_S, 2 * RESCAN_S]
    assert world.scans == ["kimi_1_"] * 3


def test_a_server_whose_starter_has_died_is_asked_to_end_and_made_to(world: World) -> None:
    world.alive = {SERVER}
    for now in (5.0, 6.0, 5.0 + ORPHAN_ENDS_WITHIN_S):
        world.dog.step(now)
    assert world.signals == [(SERVER, signal.SIGTERM)]
    assert world.said == [f"the process {PARENT} that started the server has died: the server is ended"]
    die(world, Stub("kimi_target", 20), 20.0)
    assert world.reloaded == []
    world.dog.step(5.01 + ORPHAN_ENDS_WITHIN_S)
    assert world.signals[1:] == [(SERVER, signal.SIGKILL)]


@pytest.mark.parametrize("is_parent_alive", [True, False])
def test_nothing_is_left_when_the_server_has_gone(world: World, is_parent_alive: bool) -> None:
    known, ended = Stub("kimi_target", 20), Stub("eagle3_draft", 21)
    anothers, orphan = Stub("kimi_target", 22), Stub("spec_ensemble", 23, is_orphan=True)
    world.stubs = [known, ended]
    world.dog.step(0.0)
    world.stubs, ended.state = [anothers, orphan], ""
    world.alive = {PARENT} if is_parent_alive else set()
    world.dog.run()
    assert sorted(world.signals) == [(20, signal.SIGKILL), (23, signal.SIGKILL)]
    assert world.swept == ([] if is_parent_alive else ["kimi_1_"])


def test_it_looks_as_long_as_the_server_lives(world: World) -> None:
    world.server_ends_after = 3
    world.dog.run()
    assert world.slept == [POLL_S] * 3
    assert world.looks_at_memory == [0.0]


def test_its_command_line_is_what_it_reads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made, handlers = list[Any](), dict[int, Any]()

    def make(*given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(run=lambda: given[-1]("a line"))

    monkeypatch.setattr(watchdog, "Watchdog", make)
    monkeypatch.setattr(watchdog, "ServerApi", lambda *given: given)
    monkeypatch.setattr(watchdog.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(watchdog.os, "getpid", lambda: PARENT)
    monkeypatch.setenv(watchdog.SECRET_VARIABLE, "secret")
    command = watch_command(SERVER, "kimi_1_", "host:8000", "host:8001")
    assert command[:3] == [sys.executable, "-m", "kimi_backend.hosting.watchdog"]
    watchdog.main(command[3:])
    assert made[0][:4] == (SERVER, PARENT, "kimi_1_", ("host:8000", "secret", "host:8001"))
    assert capsys.readouterr().err == "watchdog: a line\n"
    assert handlers[signal.SIGINT](2, None) is handlers[signal.SIGTERM](15, None) is None
