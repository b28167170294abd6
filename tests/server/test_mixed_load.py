"""A quarter of an hour of 32 clients of every kind, well and badly behaved: texts stay equal, and nothing grows.

`KIMI_SOAK_S` shortens it.
"""

import collections
import contextlib
import http.client
import json
import os
import random
import threading
from pathlib import Path

import pytest

from kimi_backend.hosting.stubs import find_stubs
from kimi_client import InvalidRequest, KimiClient
from served_load import serving
from support.prometheus_text import parse_samples, scrape
from support.server_process import resident_bytes
from support.waiting import wait_for

NANO = Path(__file__).resolve().parents[2] / "demo/kimi-nano"
SECONDS = float(os.environ.get("KIMI_SOAK_S", "900"))
NUM_CLIENTS = 32
PROMPTS = [f"{'tell me more ' * (number % 7)}{number}" for number in range(12)]
NUM_TOKENS = (1, 9, 60)
DRAWN = {"ignore_eos": True, "temperature": 1.0, "seed": 5}
KINDS = ("gRPC", "HTTP", "endpoint")
ALLOWED_GROWTH = 24 * 2**20
NUM_LOOKS = 15
BAD = (
    {"text_input": "x", "top_p": 2.0},
    {"text_input": "x", "bad_words": ["w"] * 2000},
    {"messages": json.dumps([{"role": "user", "content": "x"}] * 5000)},
    {"text_input": "word " * 200_000},
)


class Clients:
    """32 threads, each with one request after the other."""

    def __init__(self, ports):
        self.ports = ports
        self.over = threading.Event()
        self.done = collections.Counter()
        self.problems = []
        self.expected = {}
        """(prompt, number of tokens) -> text, as gRPC gave it with nothing beside it."""
        self._own = threading.local()

    @property
    def grpc(self):
        """This thread's client over gRPC, which keeps its connection; those who leave have one of their own."""
        if not hasattr(self._own, "client"):
            self._own.client = KimiClient(f"127.0.0.1:{self.ports['grpc']}")
        return self._own.client

    def run(self):
        for prompt in PROMPTS:
            for num_tokens in NUM_TOKENS:
                self.expected[prompt, num_tokens] = self.text("gRPC", prompt, num_tokens)
        threads = [threading.Thread(target=self._serve, args=(seed,)) for seed in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        return threads

    def _serve(self, seed):
        draw = random.Random(seed)
        while not self.over.is_set() and not self.problems:
            mood = draw.choices(("read", "leave", "bad"), (8, 1, 1))[0]
            try:
                getattr(self, f"_{mood}")(draw)
            except Exception as error:
                self.problems.append(f"{mood}: {error!r}")
            self.done[mood] += 1

    def _read(self, draw):
        kind, (prompt, num_tokens) = draw.choice(KINDS), draw.choice(list(self.expected))
        found = self.text(kind, prompt, num_tokens)
        if found != self.expected[prompt, num_tokens]:
            self.problems.append(f"{kind} {prompt!r} {num_tokens}: {found!r}")

    def _leave(self, draw):
        with KimiClient(f"127.0.0.1:{self.ports['grpc']}") as client:
            stream = client.stream(text_input=draw.choice(PROMPTS), max_tokens=200, ignore_eos=True)
            next(iter(stream))
            stream.cancel()

    def _bad(self, draw):
        fields = draw.choice(BAD)
        if draw.choice((True, False)):
            post(self.ports["http"], "/v2/models/spec_ensemble/generate", fields, 400)
            return
        with contextlib.suppress(InvalidRequest):
            self.grpc.generate(**fields)
            self.problems.append(f"taken: {list(fields)}")

    def text(self, kind, prompt, num_tokens):
        if kind == "gRPC":
            return self.grpc.generate(text_input=prompt, max_tokens=num_tokens, **DRAWN).text
        body = {"max_tokens": num_tokens, **DRAWN}
        if kind == "HTTP":
            reply = post(self.ports["http"], "/v2/models/spec_ensemble/generate", {"text_input": prompt, **body})
            return reply["text_output"]
        reply = post(self.ports["openai"], "/v1/completions", {"prompt": prompt, **body})
        return reply["choices"][0]["text"]


def post(port, path, body, status=200):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        value = json.loads(reply.read())
        assert reply.status == status, value
        return value


def measure(served):
    """Memory, descriptors and shared-memory regions of every process."""
    pids = {stub.model: stub.pid for stub in find_stubs(served.prefix)}
    pids |= {name: served.pid_of(name) for name in ("tritonserver", "kimi serve", "endpoint", "watchdog")}
    return {
        "memory": {name: resident_bytes(pid) for name, pid in pids.items()},
        "descriptors": {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
        "regions": {path.name: path.stat().st_size for path in Path("/dev/shm").glob(f"{served.prefix}*")},
    }


def assert_idle(served):
    def is_idle():
        return not any(
            value
            for (name, _), value in parse_samples(scrape(served.ports["metrics"])).items()
            if name in ("kimi_requests_running", "kimi_kv_blocks_used")
        )

    wait_for(is_idle, "blocks are held", poll_s=0.1)


@pytest.mark.soak
def test_nothing_grows_and_no_text_changes(tmp_path):
    with serving(NANO, tmp_path) as served:
        clients = Clients(served.ports)
        threads = clients.run()
        looks = []
        while len(looks) < NUM_LOOKS and not clients.problems:
            clients.over.wait(SECONDS / NUM_LOOKS)
            looks.append(measure(served))
        clients.over.set()
        for thread in threads:
            thread.join()
        assert not clients.problems, clients.problems[:5]
        assert set(clients.done) == {"read", "leave", "bad"}
        assert_idle(served)
        early, late = looks[NUM_LOOKS // 3], looks[-1]
        assert late["regions"] == early["regions"]
        megabytes = {name: [look["memory"][name] // 2**20 for look in looks] for name in early["memory"]}
        growth = {name: late["memory"][name] - early["memory"][name] for name in early["memory"]}
        assert max(growth.values()) < ALLOWED_GROWTH, megabytes
        settled = measure(served)["descriptors"]
        assert all(settled[name] <= early["descriptors"][name] + 8 for name in settled), (early, settled)
        print(dict(clients.done), megabytes)  # noqa: T201 - pytest -s shows it
