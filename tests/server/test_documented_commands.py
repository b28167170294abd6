"""The commands of README and docs/openai.md, word for word, against the server that they say to start."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from support.documented_commands import commands_of
from support.server_process import ended_with_tests

pytest.importorskip("uvicorn")

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PORTS = (8000, 8001, 9000)
TIMEOUT_S = 240
BIN = Path(sys.executable).parent


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def words_of(start, page="README.md"):
    """The page's command that begins so, split as a shell would; this interpreter's own folder for .venv/bin."""
    (text,) = [command.text for command in commands_of(page) if command.text.startswith(start)]
    return [re.sub(r"^(?:\.venv/bin/|(?=kimi$))", f"{BIN}/", word) for word in shlex.split(text)]


def run(words):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wait_until_healthy(port, process):
    ends_at = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status
        except OSError:
            assert process.poll() is None and time.monotonic() < ends_at, "it does not serve"
            time.sleep(0.2)


@pytest.fixture(scope="module", autouse=True)
def served(tmp_path_factory):
    """README's server, which Ctrl-C ends."""
    if not all(map(is_free, PORTS)):
        pytest.skip(f"one of the README's ports {PORTS} is taken here")
    with (tmp_path_factory.mktemp("served") / "log").open("w") as log:
        server = subprocess.Popen(ended_with_tests(words_of(".venv/bin/kimi serve")), cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_until_healthy(9000, server)
            yield
        finally:
            server.send_signal(signal.SIGINT)
            code = server.wait(TIMEOUT_S)
    assert code == 0, f"kimi serve ended with {code}"
    assert list(Path("/dev/shm").glob(f"kimi_{PORTS[0]}_*")) == []


def test_generate_and_curl():
    assert run(words_of(".venv/bin/kimi generate")).strip()
    assert '"text_output"' in run(words_of("curl"))


def test_python_example():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert run([sys.executable, "-c", example])


def test_the_page_is_where_the_readme_says():
    (address,) = re.findall(r"<(http://localhost:\d+/)>", README)
    assert b"<title>" in urllib.request.urlopen(address).read()


def test_bench():
    report = json.loads(run([*words_of(".venv/bin/kimi bench"), "--json", "--repeats=1", "--num-requests=8"]))
    assert report["texts_equal"]


def test_perf_analyzer():
    run(words_of("./scripts/get_perf_analyzer.sh"))
    assert "Request count: 32" in run(words_of(".venv/bin/perf_analyzer"))


def test_the_endpoint_on_its_own():
    own_port = "9001"
    words = [own_port if word == "9000" else word for word in words_of("kimi openai", "docs/openai.md")]
    if not is_free(int(own_port)):
        pytest.skip(f"port {own_port} is taken here")
    endpoint = subprocess.Popen(ended_with_tests(words), cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        assert wait_until_healthy(own_port, endpoint) == 200
    finally:
        endpoint.terminate()
        endpoint.wait(TIMEOUT_S)


def test_curl_of_the_openai_page():
    reply = json.loads(run(words_of("curl", "docs/openai.md")))
    assert reply["choices"][0]["message"]["content"]
