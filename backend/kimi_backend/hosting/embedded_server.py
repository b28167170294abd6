"""Triton Server without a container: one process of the server that the nvidia-pytriton wheel carries."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kimi_backend.config.settings import MOST_UNARY_CALLS
from kimi_backend.errors import ModelUnavailableError
from kimi_backend.hosting import with_parent
from kimi_backend.hosting.admin_access import SECRET_VARIABLE, choose_secret, restricting_options
from kimi_backend.hosting.drain import ORCHESTRATOR, drain
from kimi_backend.hosting.ports import check_host, check_ports
from kimi_backend.hosting.server_api import ServerApi
from kimi_backend.hosting.server_installation import find_installation, python_folder
from kimi_backend.hosting.shared_memory import REGION_BYTES, check_shared_memory, sweep_regions
from kimi_backend.hosting.watchdog import watch_command
from kimi_backend.processes import LARGE_BYTES, LARGE_BYTES_VARIABLE
from kimi_backend.serving.drain_file import DRAIN_FILE_VARIABLE, DrainFile
from kimi_backend.serving.runner_secret import SECRET_FILE_VARIABLE, write_secret

MODELS = ("kimi_target", "eagle3_draft", "spec_ensemble_unary", "spec_ensemble")
"""Unloaded from the last to the first: `spec_ensemble` ends the requests that its unary twin waits for."""
CALL_THREADS = MOST_UNARY_CALLS + 32
"""Threads of each model for its calls of others and its responses; the server's own number is 32."""
LOCAL_HOST = "127.0.0.1"
EVERY_HOST = "0.0.0.0"
_POLL_S = 0.1
_EXIT_S = 3.0


_given_ports: set[int] = set()


def free_port() -> int:
    """A TCP port that nothing listens on now, another one each time: who was given one may not listen yet."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOCAL_HOST, 0))
            port = int(probe.getsockname()[1])
        if port not in _given_ports:
            _given_ports.add(port)
            return port


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPorts:
    http: int = field(default_factory=free_port)
    grpc: int = field(default_factory=free_port)
    metrics: int = field(default_factory=free_port)


class EmbeddedServer:
    """One tritonserver process over a model repository; `stop` leaves no process and no shared-memory region."""

    def __init__(
        self,
        repository: Path,
        *,
        ports: ServerPorts | None = None,
        host: str = LOCAL_HOST,
        environment: Mapping[str, str] | None = None,
        shm_prefix: str | None = None,
        log_file: Path | None = None,
        models: tuple[str, ...] = MODELS,
        exit_timeout_s: int = 10,
        ends_with_parent: bool = False,
        options: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            host: address that gRPC and metrics listen on. HTTP stays on LOCAL_HOST: one body of nested JSON ends this
                server. It has other known holes: keep it off networks.
            environment: variables for the models (`KIMI_*`), on top of this process's.
            shm_prefix: names of the shared-memory regions begin with it; regions of that prefix are swept at start.
            models: loaded in this order; the repository's others stay unloaded.
            options: more of its command line.
            ends_with_parent: the server ends by itself if the thread that called `start` dies, as by SIGKILL.
        """
        self.ports = ports or ServerPorts()
        self._host = host
        self.shm_prefix = shm_prefix or f"kimi_{self.ports.http}_"
        self._installation = find_installation()
        self._repository = repository
        self._environment = dict(environment or {})
        self._log_file = log_file
        self._models = models
        self._exit_timeout_s = exit_timeout_s
        self._options = options
        self._ends_with_parent = ends_with_parent
        self._process: subprocess.Popen[bytes] | None = None
        self._secrets: tempfile.TemporaryDirectory[str] | None = None
        self._drain_file: DrainFile | None = None
        self.runner_secret_file: Path | None = None
        """The secret's file while it runs (`serving.runner_secret`)."""
        self.admin_secret = choose_secret({**os.environ, **self._environment})
        """Opens the restricted APIs (`hosting.admin_access`)."""

    def load_too(self, model: str) -> None:
        """Load another model of the repository besides; before `start`."""
        self._models = (*self._models, model)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def start(self) -> None:
        """Start the process; returns at once (see `wait_until_ready`).

        Raises:
            ConfigError: the host or a port cannot be taken, or there is too little shared memory.
        """
        check_shared_memory(len(self._models))
        check_host(self._host)
        # Before the sweep: the regions of a server that has the port are in use.
        check_ports({"HTTP": self.ports.http, "gRPC": self.ports.grpc, "metrics": self.ports.metrics})
        sweep_regions(self.shm_prefix)
        # Without it Triton Server keeps what the largest requests took: see `give_large_memory_back`.
        environment = {LARGE_BYTES_VARIABLE: str(LARGE_BYTES), **os.environ, **self._environment}
        # Not in /dev/shm, where a server's clients might reach it.
        self._secrets = tempfile.TemporaryDirectory(prefix="kimi_secrets_")
        self.runner_secret_file = write_secret(Path(self._secrets.name))
        environment[SECRET_FILE_VARIABLE] = str(self.runner_secret_file)
        drain_file = Path(environment.get(DRAIN_FILE_VARIABLE) or f"{self._secrets.name}/drain")
        environment[DRAIN_FILE_VARIABLE] = str(drain_file)
        self._drain_file = DrainFile(drain_file)
        folders = [str(folder) for folder in self._installation.library_folders]
        environment["LD_LIBRARY_PATH"] = ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")
        environment["PATH"] = f"{python_folder(Path(self._secrets.name))}:{os.environ.get('PATH', '')}"
        log = None if self._log_file is None else self._log_file.open("wb")
        self._process = subprocess.Popen(
            self._command(),
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
        )
        if log is not None:
            log.close()

    def start_watchdog(self) -> "subprocess.Popen[bytes]":
        """A process that looks after this one (`hosting.watchdog`) and ends when the server has."""
        grpc_host = LOCAL_HOST if self._host == EVERY_HOST else self._host
        addresses = f"{LOCAL_HOST}:{self.ports.http}", f"{grpc_host}:{self.ports.grpc}"
        command = watch_command(self.process.pid, self.shm_prefix, *addresses)
        environment = {**os.environ, SECRET_VARIABLE: self.admin_secret}
        return subprocess.Popen(command, env=environment, start_new_session=True)

    def wait_until_ready(self, timeout_s: float = 600, stop_waiting: threading.Event | None = None) -> None:
        """Return when every model answers, or when `stop_waiting` is set.

        Raises:
            ModelUnavailableError: the server exited, or was not ready in time; shows the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if stop_waiting is not None and stop_waiting.is_set():
                return
            if self.process.poll() is not None:
                raise ModelUnavailableError(f"the server exited with code {self.process.returncode}{self._log_end()}")
            if time.monotonic() > deadline:
                raise ModelUnavailableError(f"the server was not ready within {timeout_s:g} s{self._log_end()}")
            time.sleep(_POLL_S)

    def cut_drain_short(self) -> None:
        """Live requests of a `stop` that drains are cancelled now; from any thread."""
        if self._drain_file is not None:
            self._drain_file.order(0)

    def stop(self, drain_s: float = 5, say: Callable[[str], None] = lambda line: None) -> None:
        """Drain, unload the models, end the server, kill what is left of its process group, sweep its regions.

        An idle client connection keeps a server that was asked to end waiting, and so does a stream that 24.10 has not
        forgotten; nobody waits for an answer by then, so it is killed after a few seconds.

        Args:
            drain_s: how long live requests may go on (`hosting.drain`).
            say: gets lines of progress.
        """
        if self.process.poll() is None:
            api = ServerApi(f"{LOCAL_HOST}:{self.ports.http}", self.admin_secret)
            if self._drain_file is not None and ORCHESTRATOR in self._models:
                drain(api, self._drain_file, drain_s, say)
            for name in reversed(self._models):
                with contextlib.suppress(OSError):
                    api.unload(name)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT_S)
        self._kill_group()
        self.process.wait()
        sweep_regions(self.shm_prefix)
        if self._secrets is not None:
            self._secrets.cleanup()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, 9)
        except ProcessLookupError:
            return  # everyone has left already

    @property
    def _base_url(self) -> str:
        return f"http://{LOCAL_HOST}:{self.ports.http}/v2"

    def _command(self) -> list[str]:
        before = [sys.executable, "-S", with_parent.__file__, str(os.getpid())] if self._ends_with_parent else []
        return [
            *before,
            str(self._installation.binary),
            f"--model-repository={self._repository}",
            f"--backend-directory={self._installation.backends}",
            "--model-control-mode=explicit",
            *(f"--load-model={name}" for name in self._models),
            f"--http-address={LOCAL_HOST}",
            *(f"--{endpoint}-address={self._host}" for endpoint in ("grpc", "metrics")),
            f"--http-port={self.ports.http}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--backend-config=python,shm-default-byte-size={REGION_BYTES}",
            f"--backend-config=python,shm-growth-byte-size={REGION_BYTES}",
            f"--backend-config=python,thread-pool-size={CALL_THREADS}",
            "--disable-auto-complete-config",
            *restricting_options(self.admin_secret, self._host),
            *self._options,
        ]

    def _is_ready(self) -> bool:
        base = self._base_url
        paths = ["health/ready", *(f"models/{name}/ready" for name in self._models)]
        try:
            for path in paths:
                urllib.request.urlopen(f"{base}/{path}", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return "spec_ensemble" not in self._models or self._engine_answers(base)

    @staticmethod
    def _engine_answers(base: str) -> bool:
        """Tell whether the orchestrator has met its runners: an empty prompt is a bad one then, and not too early.

        The server answers a request without any input itself.
        """
        url = f"{base}/models/spec_ensemble/generate"
        request = urllib.request.Request(url, data=b'{"text_input": ""}', method="POST")
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except urllib.error.HTTPError as error:
            return error.code == 400
        except OSError:
            return False
        return False

    def _log_end(self, lines: int = 25) -> str:
        if self._log_file is None:
            return ""
        text = self._log_file.read_text(errors="replace").splitlines()
        return f"; end of {self._log_file}:\n" + "\n".join(text[-lines:])
