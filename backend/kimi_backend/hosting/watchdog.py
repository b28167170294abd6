"""Looks after a server from outside, where Triton Server 24.10 would leave it broken without a word.

    KIMI_ADMIN_SECRET=… python -m kimi_backend.hosting.watchdog SERVER_PID PARENT_PID SHM_PREFIX HTTP_ADDR GRPC_ADDR

A model's process that dies stays "ready" there. A runner is loaded again; without `spec_ensemble`'s process, whose
streams 24.10 never ends, the server is ended. A process that is stopped for too long is killed, and counts as dead.
When whoever started the server has died, so does the server; when it is gone, so are the processes of its models.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from kimi_backend.hosting.admin_access import SECRET_VARIABLE
from kimi_backend.hosting.drain import ORCHESTRATOR
from kimi_backend.hosting.server_api import ServerApi
from kimi_backend.hosting.shared_memory import SharedMemoryWatch, sweep_regions
from kimi_backend.hosting.stubs import Stub, find_stubs
from kimi_backend.processes import is_alive

POLL_S = 0.25
RESCAN_S = 1.0
"""Between two looks for new stubs, which takes 10 ms."""
CONFIRM_S = 0.75
"""A stub that ended may belong to a model that is being unloaded, which is not ready then."""
STOPPED_S = 10.0
"""The limit for spec_ensemble, whose return 24.10 bears."""
RUNNER_STOPPED_S = 0.5
"""24.10 takes a runner that is still for a second for dead, and ends itself when that one goes on."""
ORPHAN_ENDS_WITHIN_S = 30.0
"""The time for a server that was asked to end as its starter has died."""
RELOAD_PAUSES_S = (0.0, 5.0, 30.0, 120.0)
"""Pauses before the first, second, … reload of a model; the last again and again."""


class Watchdog:
    """Watches one server; `run` returns when it is gone."""

    def __init__(
        self,
        server_pid: int,
        parent_pid: int,
        shm_prefix: str,
        api: ServerApi,
        say: Callable[[str], None],
    ) -> None:
        self._server_pid, self._parent_pid = server_pid, parent_pid
        self._prefix = shm_prefix
        self._api = api
        self._say = say
        self._stubs: dict[int, Stub] = {}
        self._ended_at: dict[Stub, float] = {}
        self._stopped_at: dict[Stub, float] = {}
        self._num_reloads: dict[str, int] = {}
        self._reloading: set[str] = set()
        self._next_scan_s = 0.0
        self._orphan_since: float | None = None
        self._shared_memory = SharedMemoryWatch(shm_prefix, say)

    def run(self) -> None:
        """Return when the server has ended and nothing of it is left."""
        while is_alive(self._server_pid):
            self.step(time.monotonic())
            time.sleep(POLL_S)
        self._clean_up()

    def step(self, now: float) -> None:
        """One look at everything."""
        self._look_at_parent(now)
        if now >= self._next_scan_s:
            self._next_scan_s = now + RESCAN_S
            self._stubs |= {stub.pid: stub for stub in find_stubs(self._prefix)}
            self._shared_memory.look(now)
        for stub in list(self._stubs.values()):
            self._look_at(stub, now)

    def _look_at_parent(self, now: float) -> None:
        if is_alive(self._parent_pid):
            return
        if self._orphan_since is None:
            self._orphan_since = now
            self._say(f"the process {self._parent_pid} that started the server has died: the server is ended")
            self._signal(self._server_pid, signal.SIGTERM)
        elif now - self._orphan_since > ORPHAN_ENDS_WITHIN_S:
            self._signal(self._server_pid, signal.SIGKILL)

    def _look_at(self, stub: Stub, now: float) -> None:
        state = stub.state
        if not state:
            if now - self._ended_at.setdefault(stub, now) >= CONFIRM_S:
                self._forget(stub)
                self._settle(stub)
        elif state == "T":
            limit_s = STOPPED_S if stub.model == ORCHESTRATOR else RUNNER_STOPPED_S
            if now - self._stopped_at.setdefault(stub, now) >= limit_s:
                self._say(f"{stub.model}: its process {stub.pid} is stopped for {limit_s:g} s: it is killed")
                self._signal(stub.pid, signal.SIGKILL)
        else:
            self._stopped_at.pop(stub, None)

    def _forget(self, stub: Stub) -> None:
        del self._stubs[stub.pid], self._ended_at[stub]
        self._stopped_at.pop(stub, None)

    def _settle(self, stub: Stub) -> None:
        """Settle a stub that has ended: nothing where its model was unloaded or has another by now."""
        model = stub.model
        others = find_stubs(self._prefix)
        if model in self._reloading or any(other.model == model for other in others):
            return
        if self._orphan_since is not None or self._api.is_ready(model) is not True:
            return
        if model == ORCHESTRATOR:
            self._say(f"{model}: its process {stub.pid} has died, and its streams would never end: the server is ended")
            self._signal(self._server_pid, signal.SIGKILL)
            return
        count = self._num_reloads[model] = self._num_reloads.get(model, 0) + 1
        pause_s = RELOAD_PAUSES_S[min(count, len(RELOAD_PAUSES_S)) - 1]
        self._say(f"{model}: its process {stub.pid} has died: the model is loaded again in {pause_s:g} s")
        self._reloading.add(model)
        threading.Thread(target=self._reload, args=(model, pause_s), daemon=True).start()

    def _reload(self, model: str, pause_s: float) -> None:
        time.sleep(pause_s)
        try:
            self._api.reload(model)
            self._say(f"{model}: loaded again")
        except OSError as error:
            self._say(f"{model}: cannot be loaded again: {error}")
        finally:
            self._reloading.discard(model)

    def _clean_up(self) -> None:
        """A server that was killed leaves its stubs, and with its starter gone nobody removes its regions."""
        for stub in {*self._stubs.values(), *(s for s in find_stubs(self._prefix) if s.is_orphan)}:
            if stub.state:
                self._signal(stub.pid, signal.SIGKILL)
        if not is_alive(self._parent_pid):
            sweep_regions(self._prefix)

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def watch_command(server_pid: int, shm_prefix: str, address: str, grpc_address: str) -> list[str]:
    """The command line of a watchdog for a server that this process has started."""
    return [sys.executable, "-m", __name__, str(server_pid), str(os.getpid()), shm_prefix, address, grpc_address]


def main(arguments: list[str]) -> None:
    """Return when the server is gone."""
    server_pid, parent_pid, prefix, address, grpc_address = arguments
    # Ctrl-C and a stopped service end the server; the watchdog goes on until that is so.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def say(line: str) -> None:
        sys.stderr.write(f"watchdog: {line}\n")
        sys.stderr.flush()

    api = ServerApi(address, os.environ.get(SECRET_VARIABLE, ""), grpc_address)
    Watchdog(int(server_pid), int(parent_pid), prefix, api, say).run()


if __name__ == "__main__":
    main(sys.argv[1:])
