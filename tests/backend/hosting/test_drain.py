"""The drain of a server on a clock of the test's own, and the server that settings make."""

from pathlib import Path
from typing import Any

import pytest

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.hosting import drain as drain_module
from kimi_backend.hosting import settings_to_server
from kimi_backend.hosting.drain import POLL_S, drain, main
from kimi_backend.hosting.settings_to_server import make_server, models_to_load, settings_as_environment


class Server:
    """A server and its drain file: requests left and readiness by the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: Any, ready_until_s: float = 1e9, **more: Any) -> None:
        self.now, self._left, self._ready_until_s = 0.0, left, ready_until_s
        self.limit_s: float | None = more.get("limit_s")
        self._fails = more.get("fails", False)
        self.done: list[tuple[str, Any]] = []
        self.looks: list[float] = []
        self.said: list[str] = []
        monkeypatch.setattr(drain_module.time, "monotonic", lambda: 100 + self.now)
        monkeypatch.setattr(drain_module.time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 60, "it waits for ever"

    def order(self, limit_s: float) -> None:
        self.done.append(("order", limit_s))

    def unload(self, model: str) -> None:
        self.done.append(("unload", model))
        if self._fails:
            raise OSError("no answer")

    def is_ready(self, model: str) -> bool | None:
        assert model == "spec_ensemble"
        self.looks.append(round(self.now))
        return False if self.now < self._ready_until_s else None

    @property
    def num_left(self) -> int | None:
        left: int | None = self._left(self.now)
        return left

    def drain(self, limit_s: float) -> bool:
        server: Any = self
        return drain(server, server, limit_s, self.said.append)


def test_new_requests_are_refused_and_the_live_ones_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, lambda now: 2 if now < 8.0 else 0)
    assert server.drain(20.0) is True
    assert server.done == [("order", 20.0), ("unload", "spec_ensemble")]
    assert server.now == pytest.approx(8.0, abs=POLL_S)
    assert server.looks[:7] == [1, 2, 3, 4, 5, 6, 7] and len(server.looks) <= 8
    assert server.said == [f"draining: 2 requests are left, for at most {left} s" for left in (18, 13)]


@pytest.mark.parametrize(
    ("left", "ready_until_s", "ends_s"),
    [(1, 1e9, 6.0 + 3.0), (None, 1e9, 5.0), (1, 2.5, 3.0)],
    ids=["requests outlive the limit", "nothing is reported", "the server has gone"],
)
def test_waiting_ends_without_success(
    monkeypatch: pytest.MonkeyPatch, left: int | None, ready_until_s: float, ends_s: float
) -> None:
    server = Server(monkeypatch, lambda now: left, ready_until_s)
    assert server.drain(6.0) is False
    assert server.now == pytest.approx(ends_s, abs=3 * POLL_S)


def test_an_earlier_order_stands_and_a_server_that_does_not_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch, lambda now: 0, limit_s=1.0, fails=True)
    assert server.drain(20.0) is True
    assert server.done == [("unload", "spec_ensemble")]
    assert len(server.said) == 1 and "(no answer)" in server.said[0]


@pytest.mark.parametrize(("timeout", "drained", "code"), [("7", True, 0), ("7", False, 1), ("soon", True, 2)])
def test_the_exit_code_says_how_draining_went(
    monkeypatch: pytest.MonkeyPatch, timeout: str, drained: bool, code: int
) -> None:
    given = []
    monkeypatch.setattr(drain_module, "ServerApi", lambda address, secret: (address, secret))
    monkeypatch.setattr(drain_module, "DrainFile", lambda path: path)
    monkeypatch.setattr(
        drain_module, "drain", lambda api, file, limit_s, say: given.append((api, file, limit_s)) or drained
    )
    monkeypatch.setenv("KIMI_DRAIN_TIMEOUT_S", timeout)
    monkeypatch.setenv("KIMI_DRAIN_FILE", "some/file")
    monkeypatch.setenv(drain_module.SECRET_VARIABLE, "secret")
    assert main(["host:8000"]) == code
    assert given == ([] if code == 2 else [(("host:8000", "secret"), Path("some/file"), 7.0)])


@pytest.mark.parametrize(
    ("draft", "unary", "missing"),
    [
        ("", "false", {"eagle3_draft", "spec_ensemble_unary"}),
        ("d", "false", {"spec_ensemble_unary"}),
        ("", "true", {"eagle3_draft"}),
        ("d", "true", set()),
    ],
)
def test_models_are_left_out_where_settings_need_none(draft: str, unary: str, missing: set[str]) -> None:
    models = models_to_load(ServingSettings(checkpoint="c", draft=draft, unary=unary))
    assert set(settings_to_server.MODELS) - set(models) == missing
    assert list(models) == [name for name in settings_to_server.MODELS if name not in missing]


def test_settings_reach_the_server_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_to_server, "EmbeddedServer", lambda *given, **named: (given, named))
    settings = ServingSettings(checkpoint="c", drain_timeout_s=0.2)
    made: Any = make_server(settings, host="h", options=("--x",), ends_with_parent=True)
    ((repository,), named) = made
    assert (repository / "spec_ensemble").is_dir()
    assert (named["host"], named["options"], named["ends_with_parent"]) == ("h", ("--x",), True)
    assert (named["exit_timeout_s"], named["models"]) == (1, models_to_load(settings))
    assert named["environment"]["KIMI_CHECKPOINT"] == "c"
    assert ServingSettings.from_parameters({}, settings_as_environment(settings)) == settings
    with pytest.raises(ConfigError, match="setting checkpoint: empty"):
        make_server(ServingSettings())
