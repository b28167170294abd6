"""One server for all tests that leave it as they found it. `make test` runs this folder in one process."""

import importlib.util

import pytest

from support.server_process import running_server, serving_settings, write_checkpoint

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
