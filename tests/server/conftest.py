"""One server for all tests that leave it as they found it, and one whose models tests kill.

`make test` runs this folder in two processes: one has the tests of the common server, the other the files whose tests
start servers of their own, whole files at a time.
"""

import importlib.util
from pathlib import PurePosixPath

import pytest

from kimi_client import KimiClient
from support.raising_target import write_repository
from support.server_process import running_server, serving_settings, write_checkpoint
from support.streams import wait_for_speculation

HAS_SERVER = importlib.util.find_spec("pytriton") is not None
BREAKING = {"test_recovery", "test_storm"}
"""Files that share `server_to_break`."""
ALONE = {"test_documented_commands", "test_shutdown", "test_start_script", "test_step_board", "test_watchdog"}
"""Files that start what they need themselves; the others share `server`."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """What shares a server goes to one process. xdist's own groups do not work with pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            name = PurePosixPath(nodeid.split("::")[0]).stem
            return name if name in ALONE else "breaking" if name in BREAKING else "common"

    return ByServer(config, log)


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
    """While this file is there the target of `server_to_break` raises."""
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
