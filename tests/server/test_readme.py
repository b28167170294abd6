"""The README's commands, word for word, against the server that it says to start."""

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_backend.cli.serve import make_server
from kimi_backend.serving.embedded_server import ServerPorts
from support.server_process import serving_settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
GRPC_PORT, HTTP_PORT = 8001, 8000
TIMEOUT_S = 240


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def command(start):
    """The README's line that begins so, split as a shell would; this interpreter's own folder for .venv/bin."""
    line = next(line for line in README.splitlines() if line.startswith(start))
    return [re.sub(r"^\.venv/bin", str(Path(sys.executable).parent), word) for word in shlex.split(line, comments=True)]


def run(words):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def readme_server(checkpoint, tmp_path_factory):
    if not (is_free(GRPC_PORT) and is_free(HTTP_PORT)):
        pytest.skip(f"the README's ports {HTTP_PORT} and {GRPC_PORT} are taken here")
    log = tmp_path_factory.mktemp("readme") / "server.log"
    server = make_server(serving_settings(checkpoint), ports=ServerPorts(http=HTTP_PORT, grpc=GRPC_PORT), log_file=log)
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_perf_analyzer(readme_server):
    run(command("./scripts/get_perf_analyzer.sh"))
    out = run(command(".venv/bin/perf_analyzer"))
    assert "Request count: 32" in out


def test_bench(readme_server):
    report = json.loads(run([*command(".venv/bin/kimi bench"), "--json", "--repeats=1"]))
    assert report["texts_equal"]


def test_generate_and_curl(readme_server):
    assert run(command(".venv/bin/kimi generate")).strip()
    assert '"text_output"' in run(command("curl"))


def test_python_example(readme_server):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert run([sys.executable, "-c", example])
