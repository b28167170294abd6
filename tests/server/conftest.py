"""One server for all tests that leave it as they found it, and one whose models tests kill.

What shares a server runs in one process (`scheduling.scope_of`). A server ends with the last test of this folder there.
"""

import importlib.util

import pytest

from kimi_client import KimiClient
from support.server_process import running_server, serving_settings, write_checkpoint
from support.steered_target import SteeredTarget
from support.streams import wait_for_speculation

HAS_SERVER = importlib.util.find_spec("pytriton") is not None


def pytest_itemcollected(item):
    if "tests/server/" in str(item.path):
        item.add_marker(pytest.mark.server)
        if not HAS_SERVER:
            item.add_marker(pytest.mark.skip(reason="nvidia-pytriton, the embedded server, is not installed"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "checkpoint")


@pytest.fixture(scope="package")
def steered_target(tmp_path_factory):
    """The target of `server`."""
    return SteeredTarget(tmp_path_factory.mktemp("steered"))


@pytest.fixture(scope="package")
def server(checkpoint, steered_target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with running_server(serving_settings(checkpoint), folder, steered_target.repository) as running:
        yield running


@pytest.fixture
def slow_steps(steered_target):
    """The server's steps take long during the test, so that a request is there for as long as the test needs it."""
    with steered_target.slow():
        yield


@pytest.fixture(scope="package")
def url(server):
    return f"localhost:{server.ports.grpc}"


@pytest.fixture(scope="package")
def target_to_break(tmp_path_factory):
    """The target of `server_to_break`."""
    return SteeredTarget(tmp_path_factory.mktemp("steered_to_break"))


@pytest.fixture(scope="package")
def server_to_break(checkpoint, target_to_break, tmp_path_factory):
    """A server whose models tests kill, unload and reload; each leaves it serving and drafting."""
    folder, settings = tmp_path_factory.mktemp("server_to_break"), serving_settings(checkpoint, drain_timeout_s=2.0)
    with running_server(settings, folder, target_to_break.repository) as running:
        yield running


@pytest.fixture
def broken_client(server_to_break):
    """A client of `server_to_break`. It is closed, since a server waits for idle connections when it ends."""
    with KimiClient(f"localhost:{server_to_break.ports.grpc}") as client:
        yield client
        wait_for_speculation(client)
