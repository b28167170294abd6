"""A real Triton Server over a random tiny checkpoint, and what can be seen of its processes from outside."""

import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset
from kimi_backend.cli.make_checkpoint import make_checkpoint
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.settings import ServingSettings
from kimi_backend.hosting import with_parent
from kimi_backend.hosting.embedded_server import EmbeddedServer
from kimi_backend.hosting.settings_to_server import make_server
from kimi_backend.processes import is_alive
from kimi_backend.serving.metric_table import UPDATES
from support.prometheus_text import scrape
from support.waiting import PATIENCE_S, wait_for

MAX_MODEL_LEN = 512
KV_TOKENS = 64 * 128
ENDLESS_MODEL_LEN = 4096
"""The longest sequence of servers whose requests a test ends, kills or waits for: they take ten seconds otherwise."""
ENDLESS_KV_TOKENS = 17 * ENDLESS_MODEL_LEN
ENDLESS = {"max_tokens": ENDLESS_MODEL_LEN - 16, "ignore_eos": True}
METRICS_INTERVAL_S = 0.05


def write_checkpoint(folder: Path) -> Path:
    """A random tiny target in `folder`, its draft in `folder`/draft."""
    make_checkpoint(
        folder,
        preset=Preset.TINY,
        num_layers=3,
        quantization=QuantizationMethod.INT4,
        draft=DraftKind.MLA,
        architecture=Architecture.KIMI_K25,
    )
    return folder


def serving_settings(checkpoint: Path, **changes: object) -> ServingSettings:
    """Small pools, the plain kernels, both models."""
    values: dict[str, object] = {
        "checkpoint": str(checkpoint),
        "draft": str(checkpoint / "draft"),
        "device": "cpu",
        "max_model_len": MAX_MODEL_LEN,
        "kv_tokens": KV_TOKENS,
        "metrics_interval_s": METRICS_INTERVAL_S,
        "probe_at_start": "off",
        "unary": "true",
        "speculation_policy": "fixed",  # a draft of random weights is soon left alone otherwise
    }
    return ServingSettings(**{**values, **changes})  # type: ignore[arg-type]


FEW_DESCRIPTORS = 128


def allow_few_descriptors() -> None:
    """Give this process a soft limit of FEW_DESCRIPTORS, as the `preexec_fn` of one that raises it to the hard one."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def ended_with_tests(command: Sequence[str | Path]) -> list[str | Path]:
    """A command that runs another one, which is told to end (SIGTERM) when this process has died, however it died."""
    return [sys.executable, "-S", with_parent.__file__, str(os.getpid()), *command]


@contextmanager
def running_server(
    settings: ServingSettings,
    folder: Path,
    model_repository: Path | None = None,
) -> Iterator[EmbeddedServer]:
    """A server that is ready, and ends with this process; its log is `folder`/server.log."""
    server = make_server(
        settings,
        log_file=folder / "server.log",
        model_repository=model_repository,
        ends_with_parent=True,
    )
    server.start()
    try:
        server.wait_until_ready(PATIENCE_S)
        yield server
    finally:
        server.stop()


def stub_pids(server: EmbeddedServer) -> dict[str, int]:
    """Model name -> process id of its Python backend stub."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"triton_python_backend_stub" in command[0] and any(server.shm_prefix.encode() in c for c in command):
            path = next(c.decode() for c in command if c.endswith(b"model.py"))
            found[Path(path).parent.parent.name] = int(entry.name)
    return found


def rank_pids(stub: int) -> list[int]:
    """Process ids of the ranks that a model's process has started."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{stub}/task").glob("*/children")).split()
    return [int(child) for child in children if b"kimi_backend.rank_worker.worker" in _command(child)]


def _command(process_id: str) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def wait_until_gone(process_ids: list[int]) -> None:
    """All of them."""
    wait_for(lambda: not any(is_alive(process_id) for process_id in process_ids), "processes are left")


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def regions(server: EmbeddedServer) -> dict[str, int]:
    """Shared-memory regions of this server: name -> size."""
    return {path.name: path.stat().st_size for path in Path("/dev/shm").glob(f"{server.shm_prefix}*")}


def gauge(server: EmbeddedServer, name: str) -> float:
    """Sum of a gauge over its labels; it comes a moment after `spec_ensemble` is loaded."""

    def look() -> list[float]:
        lines = scrape(server.ports.metrics).splitlines()
        return [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[{{ ]", line)]

    return sum(wait_for(look, f"no gauge {name}", poll_s=0.05))


@contextmanager
def cut_short(server: EmbeddedServer, num_tokens: int) -> Iterator[None]:
    """Check that the block ends what it starts: afterwards all is free, and not half of `num_tokens` was generated."""
    assert_everything_is_free(server)
    before = gauge(server, "kimi_generation_tokens_total")
    yield
    assert_everything_is_free(server)
    assert gauge(server, "kimi_generation_tokens_total") - before < num_tokens / 2


def wait_until_running(server: EmbeddedServer, count: int) -> None:
    """Return when so many requests run."""
    wait_for(lambda: gauge(server, "kimi_requests_running") >= count, "they do not run", poll_s=0.02)


def assert_everything_is_free(server: EmbeddedServer) -> None:
    """Soon nothing runs and no sequence holds a block; the metrics then know of all that has ended before."""
    wait_until_published(server)
    wait_for(lambda: is_free(server), "requests still run", poll_s=0.05)
    wait_until_published(server)


def wait_until_published(server: EmbeddedServer) -> None:
    """Return when the metrics say all that was so before the call.

    An update may be under way then; the one after it began later.
    """
    wanted = gauge(server, UPDATES) + 2
    wait_for(lambda: gauge(server, UPDATES) >= wanted, "the metrics stand still", poll_s=0.02)


def is_free(server: EmbeddedServer) -> bool:
    """Tell whether nothing runs and no sequence holds a block, as far as the metrics know."""
    return not gauge(server, "kimi_requests_running") and not gauge(server, "kimi_kv_blocks_used")
