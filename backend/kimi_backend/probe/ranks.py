"""The probe where several GPUs share the models: every rank runs the whole of it over its part, in step with the rest.

    python -m kimi_backend.probe.ranks RANK HOST:PORT PARENT_PID < job

A rank's results are those of rank 0, so the others' are not read.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from kimi_backend.config.chosen_configs import ChosenConfigs, check_gpus
from kimi_backend.config.settings import ServingSettings
from kimi_backend.parallel import TensorParallelGroup
from kimi_backend.probe.loading import OpenedProbe, open_probe
from kimi_backend.processes import end_with_starter
from kimi_backend.runners.load.placement import place
from kimi_backend.runners.ranks.divisible import check_divides
from kimi_backend.runners.ranks.messages import TIMEOUTS
from kimi_backend.runners.ranks.process_group import join_ranks, leave

_GRACE_S = 2.0
"""The time for rank 0 to say itself what is wrong: it is mostly wrong on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob:
    """A job says what every rank is to do."""

    settings: ServingSettings
    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_draft_tokens: int

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest text, draft tokens included."""
        return max(map(len, self.prompts)) + self.num_tokens + self.num_draft_tokens


@contextmanager
def opened_on_ranks(job: ProbeJob) -> Iterator[OpenedProbe]:
    """Rank 0's part of the probe, while the other ranks, in processes of their own, run theirs. Where a rank ends
    before its time this process ends too: its collectives would never.

    Raises:
        ConfigError, CheckpointError: as `open_probe`; RankError: a rank did not come.
    """
    size = job.settings.tensor_parallel_size
    if size == 1:
        yield open_probe(job.settings, job.max_model_len)
        return
    # What is wrong with the settings is found before any process is started.
    configs = ChosenConfigs.read(job.settings)
    check_divides(size, configs.target, configs.draft)
    check_gpus(job.settings)
    listener = socket.create_server(("127.0.0.1", 0))
    address, is_over = f"127.0.0.1:{listener.getsockname()[1]}", threading.Event()
    watches = [
        threading.Thread(target=_run, args=(job, rank, address, is_over), daemon=True) for rank in range(1, size)
    ]
    for watch in watches:
        watch.start()
    try:
        device = place(job.settings).device
        group = join_ranks(0, size, address, device, listener=listener, **TIMEOUTS)
        yield open_probe(job.settings, job.max_model_len, group)
        is_over.set()
        leave(group)
    finally:
        is_over.set()
    for watch in watches:
        watch.join()


def _run(job: ProbeJob, rank: int, address: str, is_over: threading.Event) -> None:
    """Start a rank, and wait for it in the thread that it ends with."""
    command = [sys.executable, "-m", "kimi_backend.probe.ranks", str(rank), address, str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True)
    process.communicate(json.dumps(asdict(job)))
    if not is_over.is_set() and process.returncode:
        time.sleep(_GRACE_S)
        if not is_over.is_set():
            sys.stderr.write(f"probe: rank {rank} has ended with code {process.returncode}; this process ends\n")
            sys.stderr.flush()
            os._exit(1)


def _work(job: ProbeJob, rank: int, address: str) -> None:
    device = place(job.settings, rank).device
    group: TensorParallelGroup = join_ranks(rank, job.settings.tensor_parallel_size, address, device, **TIMEOUTS)
    opened = open_probe(job.settings, job.max_model_len, group)
    texts = opened.write_texts(job.prompts, job.num_tokens)
    for _ in opened.run(texts, job.num_draft_tokens):
        pass
    leave(group)


def main(arguments: list[str]) -> None:
    """A rank other than 0."""
    rank, address, parent_pid = int(arguments[0]), arguments[1], int(arguments[2])
    end_with_starter(parent_pid)
    fields = json.load(sys.stdin)
    settings = ServingSettings(**fields.pop("settings"))
    prompts = tuple(map(tuple, fields.pop("prompts")))
    _work(ProbeJob(settings=settings, prompts=prompts, **fields), rank, address)


if __name__ == "__main__":
    main(sys.argv[1:])
