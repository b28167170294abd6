"""Clients that read, cancel, leave and time out while models are killed and reloaded: no text is ever wrong."""

import os
import random
import signal
import threading
import time

from kimi_client import KimiClient, KimiClientError, RequestCancelled, ServerBusy, ServerFailed
from support.server_process import is_free, stub_pids
from support.streams import control, generate_when_back
from support.waiting import PATIENCE_S, wait_for

NUM_CLIENTS = 6
REQUESTS = [
    {"text_input": text, "max_tokens": max_tokens, "seed": seed, "temperature": temperature, "ignore_eos": True}
    | {"num_speculative_tokens": k}
    for seed, (text, max_tokens, temperature, k) in enumerate(
        (text, max_tokens, temperature, k)
        for text in ("tell me", "x" * 70)
        for max_tokens in (1, 9, 60)
        for temperature in (0.0, 1.0)
        for k in (0, 3)
    )
]
EVENTS = [
    ("kill", "eagle3_draft"),
    ("reload", "spec_ensemble"),
    ("reload", "kimi_target"),
    ("reload", "eagle3_draft"),
    ("kill", "kimi_target"),
    ("reload", "spec_ensemble"),
]
ALLOWED = (ServerBusy, ServerFailed, RequestCancelled)
"""Errors while a model is away: it is loading, its process died, its requests were cancelled."""


class Reader(threading.Thread):
    """One request after the other, each in a mood of its own."""

    def __init__(self, url: str, seed: int, expected: list[str], stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.url, self.random, self.expected, self.stop = url, random.Random(seed), expected, stop
        self.problems: list[str] = []
        self.num_done = 0

    def run(self) -> None:
        while not self.stop.is_set():
            index = self.random.randrange(len(REQUESTS))
            try:
                self.serve_one(index, self.random.choice(("read", "read", "cancel", "leave", "deadline")))
            except ALLOWED:
                time.sleep(0.02)
            except (KimiClientError, OSError) as error:
                self.problems.append(f"request {index}: {error!r}")

    def serve_one(self, index: int, mood: str) -> None:
        fields, expected = REQUESTS[index], self.expected[index]
        with KimiClient(self.url, timeout_s=PATIENCE_S) as client:
            if mood == "deadline":
                text = client.stream(**fields, timeout_s=self.random.uniform(0.001, 0.1)).result().text
                is_right = expected.startswith(text)
            elif mood == "read":
                text = client.stream(**fields).result().text
                is_right = text == expected
                self.num_done += 1
            else:
                stream = client.stream(**fields)
                if self.random.random() < 0.5:
                    next(iter(stream), None)
                if mood == "cancel":
                    stream.cancel()
                return
        if not is_right:
            self.problems.append(f"request {index}: {text!r} instead of {expected!r}")


def num_done(readers):
    return sum(reader.num_done for reader in readers)


def test_no_text_is_wrong_and_nothing_is_left(server_to_break, broken_client):
    stop = threading.Event()
    url = f"localhost:{server_to_break.ports.grpc}"
    expected = [broken_client.generate(**fields).text for fields in REQUESTS]
    readers = [Reader(url, seed, expected, stop) for seed in range(NUM_CLIENTS)]
    for reader in readers:
        reader.start()
    for turn, (action, model) in enumerate(EVENTS):
        wait_for(lambda wanted=4 * turn + 4: num_done(readers) >= wanted)
        if action == "kill":
            os.kill(stub_pids(server_to_break)[model], signal.SIGKILL)
            time.sleep(0.3)
        control(server_to_break, model, "unload")
        control(server_to_break, model, "load")
        generate_when_back(broken_client, **REQUESTS[0])
    stop.set()
    for reader in readers:
        reader.join(2 * PATIENCE_S)
        assert not reader.is_alive()
    assert [problem for reader in readers for problem in reader.problems] == []
    wait_for(lambda: is_free(server_to_break), "requests still run")
    assert [broken_client.generate(**fields).text for fields in REQUESTS] == expected
