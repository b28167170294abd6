"""Requests are read in order of arrival, short ones past long ones; each that waits is read or refused, once."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kimi_backend.errors import CapacityError, InvalidRequestError, RequestCancelledError
from kimi_backend.serving import request_lanes
from kimi_backend.serving.request_lanes import MOST_WAITING_BYTES, SHORT_BYTES, Arrival, RequestLanes
from support.fake_pb_utils import RecordingSender, Tensor
from support.waiting import PATIENCE_S, wait_for

LONG = SHORT_BYTES + 1
MOST_WAITING = 20


class Readers:
    """Keeps what was read and refused; `gate` holds long requests up until it is set."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.refused: dict[str, BaseException] = {}
        self.gate = threading.Event()
        self.lanes = RequestLanes(self._read, self._refuse, MOST_WAITING)

    def _read(self, arrival: Arrival) -> None:
        if arrival.num_bytes > SHORT_BYTES:
            self.gate.wait(PATIENCE_S)
        if arrival.request_id.startswith("bad"):
            raise InvalidRequestError("bad")
        self.read.append(arrival.request_id)

    def _refuse(self, arrival: Arrival, error: BaseException) -> None:
        assert arrival.request_id not in self.refused
        self.refused[arrival.request_id] = error
        if arrival.request_id == "bad and unheard":
            raise RuntimeError("its answer failed")

    def put(self, name: str, num_bytes: int = 1, sender: RecordingSender | None = None) -> None:
        self.lanes.put(
            Arrival(request_id=name, sender=sender or RecordingSender(), tensors={}, parameters="", num_bytes=num_bytes)
        )


@pytest.fixture
def readers() -> Iterator[Readers]:
    made = Readers()
    yield made
    made.gate.set()
    made.lanes.close("closed")
    made.lanes.wait(PATIENCE_S)


def fill_the_long_lane(readers: Readers) -> None:
    """The first is being read, and does not end."""
    readers.put("first", LONG)
    wait_for(lambda: readers.lanes._long._is_reading)
    for number in range(MOST_WAITING):
        readers.put(f"long {number}", LONG)


def test_short_requests_pass_long_ones_and_each_lane_keeps_its_order(readers: Readers) -> None:
    fill_the_long_lane(readers)
    for number in range(200):
        readers.put(f"short {number}", SHORT_BYTES)
        wait_for(lambda: readers.lanes._short.num_waiting < MOST_WAITING)
    wait_for(lambda: readers.read == [f"short {number}" for number in range(200)])
    wait_for(lambda: readers.lanes.num_waiting == 1 + MOST_WAITING)
    readers.gate.set()
    wait_for(lambda: readers.read[200:] == ["first", *(f"long {number}" for number in range(MOST_WAITING))])
    wait_for(lambda: readers.lanes.num_waiting == 0)


def test_a_full_lane_says_that_the_request_may_come_again(readers: Readers) -> None:
    fill_the_long_lane(readers)
    with pytest.raises(CapacityError, match=r"^20 requests wait to be read, at most 20 may; try later$"):
        readers.put("one too many", LONG)
    readers.put("short")
    wait_for(lambda: readers.read == ["short"])


def test_waiting_requests_hold_so_much_memory_together(readers: Readers) -> None:
    readers.put("first", LONG)
    wait_for(lambda: readers.lanes._long._is_reading)
    readers.put("larger than all may be", MOST_WAITING_BYTES + 1)
    with pytest.raises(CapacityError, match=r"bytes wait to be read, with this one at most 67108864 may; try later$"):
        readers.put("one more", LONG)
    readers.gate.set()
    wait_for(lambda: readers.lanes.num_waiting == 0)
    readers.put("one more", LONG)
    wait_for(lambda: len(readers.read) == 3)


def test_a_request_whose_client_leaves_while_it_waits_is_not_read(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_lanes, "ASK_AFTER_S", 0.0)
    left = RecordingSender()
    readers.put("first", LONG)
    readers.put("left", LONG, left)
    readers.put("stays", LONG)
    left.cancelled = True
    readers.gate.set()
    wait_for(lambda: readers.read == ["first", "stays"])
    assert {name: type(error) for name, error in readers.refused.items()} == {"left": RequestCancelledError}


def test_a_bad_request_is_refused_and_the_next_one_is_read(readers: Readers) -> None:
    for name in ("bad", "good", "bad and unheard", "good too"):
        readers.put(name)
    wait_for(lambda: readers.read == ["good", "good too"])
    assert list(readers.refused) == ["bad", "bad and unheard"]


def test_what_waits_when_the_lanes_close_is_refused_and_what_is_read_is_finished(readers: Readers) -> None:
    fill_the_long_lane(readers)
    readers.lanes.close("the server is shutting down")
    readers.lanes.wait(0.0)
    assert readers.read == [] and readers.lanes.num_waiting > 0
    readers.gate.set()
    readers.lanes.wait(PATIENCE_S)
    assert readers.read == ["first"]
    assert [str(error) for error in readers.refused.values()] == ["the server is shutting down"] * MOST_WAITING
    with pytest.raises(CapacityError, match="shutting down"):
        readers.put("late")


def test_an_arrival_is_a_copy_and_knows_its_size() -> None:
    ids, texts = np.arange(3, dtype=np.int32), np.array([[b"abc", b"de"]], np.object_)
    inputs = [Tensor("input_ids", ids), Tensor("stop", texts)]
    arrival = Arrival.of("r", RecordingSender(), inputs, "{}")
    ids[:] = 9
    texts[:] = b""
    assert arrival.tensors["input_ids"].tolist() == [0, 1, 2]
    assert arrival.tensors["stop"].tolist() == [[b"abc", b"de"]]
    assert arrival.num_bytes == 2 + 12 + 16 + 5
