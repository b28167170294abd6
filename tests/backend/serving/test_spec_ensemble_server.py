"""The parts of `spec_ensemble`'s server between its lanes, its engine and its senders, each scripted."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import CapacityError, InvalidRequestError
from kimi_backend.serving import spec_ensemble_server
from kimi_backend.serving.request_lanes import Arrival
from kimi_backend.serving.spec_ensemble_server import SpecEnsembleServer, make_parser, scheduler_settings
from kimi_backend.types.request import FinishReason, TokenDelta
from support import fake_pb_utils
from support.fake_pb_utils import RecordingSender

SETTINGS = ServingSettings(checkpoint="/t", draft="/d")


class Parts:
    """A server whose parts keep what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: ServingSettings = SETTINGS) -> None:
        self.done: list[Any] = []
        self.now = 100.0
        self.num_waiting, self.num_live = 0, 0
        self.parsed: Any = None
        self.limit_s: float | None = None
        self.is_wanted = False
        self.dead: set[int] = set()
        self.target_process_id: int | None = None
        self.draft_process_id: int | None = None
        self.max_prompt_tokens = 50
        server = SpecEnsembleServer.__new__(SpecEnsembleServer)
        server._settings, server._handles, server._drains_since = settings, {}, None
        server._has_started, server._closed, server._ids = False, threading.Event(), iter(range(9))
        for name in (
            "_engine",
            "_sender",
            "_metrics",
            "_lanes",
            "_parser",
            "_tokenizer",
            "_engine_lock",
            "_drain_file",
        ):
            setattr(server, name, self)
        self.server = server
        monkeypatch.setattr(spec_ensemble_server, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(spec_ensemble_server, "is_alive", lambda pid: pid not in self.dead)

    def __getattr__(self, name: str) -> Any:
        """Any other method: kept with its arguments."""
        return lambda *given, **_: self.done.append((name, *given))

    def parse(self, request_id: str, tensors: Any, parameters: Any, max_prompt_tokens: int) -> Any:
        self.done.append(("parse", request_id, parameters, max_prompt_tokens))
        return self.parsed

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return f"text of {token_ids}"

    def submit(self, generate: Any, sink: Any) -> str:
        self.done.append(("submit", sink == self.server._on_delta))
        return "handle"

    def names(self) -> list[str]:
        return [name for name, *_ in self.done]


def parsed(**sampling: Any) -> Any:
    fields = {"max_tokens": None, "prompt_logprobs": None, "seed": None, **sampling}
    generate = SimpleNamespace(request_id="r", prompt_token_ids=(1, 2), sampling=SimpleNamespace(**fields))
    return SimpleNamespace(generate=generate, echo=False)


ARRIVAL = Arrival(request_id="r", sender="sender", tensors={}, parameters='{"seed": 3}', num_bytes=1)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


@pytest.mark.parametrize(("has_echo", "echo"), [(False, ""), (True, "text of (1, 2)")])
def test_a_request_is_read_registered_and_submitted(parts: Parts, has_echo: bool, echo: str) -> None:
    parts.parsed = parsed()
    parts.parsed.echo = has_echo
    parts.server._start(ARRIVAL)
    assert parts.done == [
        ("wait_until_ready", spec_ensemble_server.HANDSHAKE_PATIENCE_S),
        ("parse", "r", {"seed": 3}, 50),
        ("check", parts.parsed.generate),
        ("register", "r", "sender", parts.parsed, echo),
        ("submit", True),
    ]
    assert parts.server._handles["r"].result() == "handle"


def test_a_request_for_no_token_is_answered_without_a_model(parts: Parts) -> None:
    parts.parsed = parsed(max_tokens=0, seed=7)
    parts.server._start(ARRIVAL)
    assert parts.names()[-2:] == ["register", "put"]
    (_, delta) = parts.done[-1]
    assert (delta.request_id, delta.token_ids, delta.finish_reason) == ("r", (), FinishReason.LENGTH)
    assert (delta.stats.num_prompt_tokens, delta.stats.num_output_tokens, delta.stats.seed) == (2, 0, 7)
    assert (delta.stats.max_tokens, delta.stats.num_cached_tokens, delta.stats.num_preemptions) == (0, 0, 0)
    assert (delta.stats.queue_time_s, delta.stats.total_time_s) == (0.0, 0.0)
    assert parts.server._handles == {}


def test_a_prompt_that_is_scored_meets_the_model(parts: Parts) -> None:
    parts.parsed = parsed(max_tokens=0, prompt_logprobs=0)
    parts.server._start(ARRIVAL)
    assert parts.names()[-1] == "submit"


def test_the_last_delta_ends_a_requests_handle_and_is_counted(parts: Parts) -> None:
    parts.server._handles = {"r": Future()}
    parts.server._on_delta(TokenDelta(request_id="r", token_ids=(1,)))
    assert "r" in parts.server._handles
    stats: Any = "stats"
    parts.server._on_delta(TokenDelta(request_id="r", token_ids=(), finish_reason=FinishReason.STOP, stats=stats))
    assert (parts.server._handles, parts.names()) == ({}, ["put", "finished", "put"])


def test_a_client_that_leaves_cancels_its_request_now_or_when_it_is_submitted(parts: Parts) -> None:
    handle = SimpleNamespace(cancel=lambda: parts.done.append("cancelled"))
    waiting: Future[Any] = Future()
    parts.server._handles = {"r": waiting}
    parts.server._cancel("r")
    parts.server._cancel("another")
    assert parts.done == []
    waiting.set_result(handle)
    parts.server._cancel("r")
    assert parts.done == ["cancelled", "cancelled"]


def test_a_refusal_is_counted_by_its_code(parts: Parts) -> None:
    parts.server._handles = {"r": Future()}
    for error in (CapacityError("full"), ZeroDivisionError()):
        parts.server._refuse(ARRIVAL, error)
    assert [entry for entry in parts.done if entry[0] == "refused"] == [
        ("refused", "UNAVAILABLE"),
        ("refused", "INTERNAL"),
    ]
    assert parts.done[1][:3] == ("refuse", "r", "sender")
    assert parts.server._handles == {}


class Request(fake_pb_utils.Request):
    def parameters(self) -> str:
        return ""

    def request_id(self) -> str:
        return "mine"

    def get_response_sender(self) -> RecordingSender:
        return RecordingSender()


def test_the_first_request_starts_the_engine_and_a_bad_one_is_answered_at_once(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.server, "_probe_at_start", lambda: parts.done.append(("probe",)))
    monkeypatch.setattr(spec_ensemble_server.Arrival, "of", lambda request_id, *_: request_id)
    text = {"text_input": np.array([["a"]])}
    parts.server.accept([Request(text), Request(text)])
    assert parts.done == [
        ("acquire", spec_ensemble_server.HANDSHAKE_PATIENCE_S),
        ("start",),
        ("probe",),
        ("put", "mine#0"),
        ("put", "mine#1"),
    ]

    def fail(arrival: Any) -> None:
        raise CapacityError("full")

    parts.put = fail  # type: ignore[attr-defined]
    parts.server.accept([Request(text)])
    assert parts.done[-2] == ("refused", "UNAVAILABLE")
    assert parts.done[-1][:2] == ("refuse", "mine#2")


@pytest.mark.parametrize(
    ("changes", "is_probed"),
    [
        ({"probe_at_start": "warn"}, True),
        ({"probe_at_start": "off"}, False),
        ({"probe_at_start": "warn", "draft": ""}, False),
        ({"probe_at_start": "warn", "routing": "uniform"}, False),
    ],
)
def test_a_draft_is_probed_unless_there_is_nothing_to_find(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], is_probed: bool
) -> None:
    probed: list[str] = []
    monkeypatch.setattr(spec_ensemble_server, "warn_of_wrong_draft", lambda *given: probed.append(given[-1]))
    inline = SimpleNamespace(Thread=lambda target, args, **_: SimpleNamespace(start=lambda: target(*args)))
    parts = Parts(monkeypatch, ServingSettings(**{"checkpoint": "/t", "draft": "/d", **changes}))
    monkeypatch.setattr(spec_ensemble_server, "threading", inline)
    parts.server._probe_at_start()
    assert probed == (["kimi probe /t --draft /d"] if is_probed else [])


def test_a_drain_ends_when_nothing_is_left_or_its_time_is_over(parts: Parts) -> None:
    assert not parts.server._has_drained()
    parts.limit_s, parts.num_live, parts.num_waiting = 5.0, 1, 2
    assert not parts.server._has_drained()
    assert parts.done == [("begin_drain",), ("report", 3)]
    parts.now += 4.9
    assert not parts.server._has_drained()
    parts.now += 0.1
    assert parts.server._has_drained()
    parts.now = 101.0
    parts.num_live = parts.num_waiting = 0
    assert parts.server._has_drained()
    assert parts.done[2:] == [("report", 3), ("report", 3)]


def test_without_a_file_nothing_is_drained(parts: Parts) -> None:
    parts.server._drain_file, parts.limit_s = None, 5.0
    assert not parts.server._has_drained()


def looks(parts: Parts, *changes: dict[str, Any]) -> list[Any]:
    """Have the server look at its runners once before each of the changes and after the last."""
    left = [*changes, None]

    def wait(seconds: float) -> bool:
        assert seconds == spec_ensemble_server.WATCH_S
        if not left:
            return True
        change = left.pop(0)
        for name, value in (change or {}).items():
            setattr(parts, name, value)
        return False

    parts.server._closed = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    parts.server._watch()
    return parts.done


def test_a_dead_target_fails_what_is_live_once_and_a_dead_draft_is_reported(parts: Parts) -> None:
    death = {"target_process_id": 20, "draft_process_id": 21, "dead": {20}}
    done = looks(parts, {"target_process_id": 20}, death, {"dead": {20, 21}}, {"target_process_id": 22, "dead": {22}})
    assert done == [
        ("fail_live", "runner kimi_target: its process 20 has died"),
        ("report_dead_draft", 21),
        ("fail_live", "runner kimi_target: its process 22 has died"),
    ]


ENDED = ["close", "stop", "wait", "close", "close", "release"]


@pytest.mark.parametrize(
    ("change", "done"), [({"is_wanted": True}, ENDED), ({"limit_s": 0.0}, ["begin_drain", *ENDED, "report"])]
)
def test_another_engine_or_the_end_of_a_drain_ends_this_one(
    parts: Parts, change: dict[str, Any], done: list[str]
) -> None:
    looks(parts, {}, change, {"target_process_id": 20, "dead": {20}})
    assert parts.names() == done


def test_settings_of_the_scheduler_keep_within_one_another() -> None:
    given = ServingSettings(
        checkpoint="/t",
        draft="/d",
        max_num_seqs=64,
        max_num_batched_tokens=32,
        num_speculative_tokens=7,
        max_speculative_tokens=4,
        async_scheduling="false",
    )
    made = scheduler_settings(given)
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (64, 64)
    assert (made.num_speculative_tokens, made.max_speculative_tokens, made.async_scheduling) == (4, 4, False)
    assert scheduler_settings(SETTINGS).async_scheduling


def test_without_a_folder_there_is_no_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match="setting checkpoint: empty"):
        make_parser(ServingSettings())
