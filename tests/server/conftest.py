"""One server for all tests that leave it as they found it, and one whose models tests kill.

What shares a server runs in one process (`scheduling.scope_of`).
"""

import importlib.util

import pytest

from kimi_client import KimiClient
from support.raising_target import write_repository
from support.server_process import running_server, serving_settings, write_checkpoint
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


@pytest.fixture(scope="session")
def server(checkpoint, tmp_path_factory):
    with running_server(serving_settings(checkpoint), tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def url(server):
    return f"localhost:{server.ports.grpc}"


@pytest.fixture(scope="session")
def raise_trigger(tmp_path_factory):
    """The target of `server_to_break` raises while this file is there."""
    return tmp_path_factory.mktemp("trigger") / "raise"


@pytest.fixture(scope="session")
def server_to_break(checkpoint, raise_trigger, tmp_path_factory):
    """A server whose models tests kill, unload and reload; each leaves it serving and drafting."""
    folder = tmp_path_factory.mktemp("server_to_break")
    repository = write_repository(folder / "models", raise_trigger)
    with running_server(serving_settings(checkpoint, drain_timeout_s=2.0), folder, repository) as running:
        yield running


@pytest.fixture
def broken_client(server_to_break):
    """A client of `server_to_break`. It is closed, since a server waits for idle connections when it ends."""
    with KimiClient(f"localhost:{server_to_break.ports.grpc}") as client:
        yield client
        wait_for_speculation(client)
