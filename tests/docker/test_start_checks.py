"""docker/start.sh checks before it starts the server, and without one: room in /dev/shm, and which options it knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.private_shm import in_private_shm
from support.server_process import write_checkpoint
from support.start_script import START
from support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A checkpoint, free ports, and a `tritonserver` that tells its options and arguments and ends."""
    folder = tmp_path_factory.mktemp("start")
    binary = folder / "tritonserver"
    binary.write_text('#!/bin/sh\n[ "$1" = --help ] && echo "  --http-max-input-size <integer>" || echo "given: $*"\n')
    binary.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_")}
    environment["PATH"] = f"{folder}:{Path(sys.executable).parent}:{environment['PATH']}"
    ports = {f"KIMI_{name}_PORT": "1" for name in ("HTTP", "GRPC", "METRICS")}  # nobody listens there
    checkpoint = write_checkpoint(folder / "checkpoint")
    return {**environment, **ports, "KIMI_CHECKPOINT": str(checkpoint), "KIMI_DEVICE": "cpu", "KIMI_KV_TOKENS": "8192"}


def run(command, environment):
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_small_shared_memory_is_told_before_anything_is_loaded(environment):
    done = run(in_private_shm(8, [str(START)]), environment)
    assert done.returncode == 2
    assert done.stderr.startswith("start.sh: /dev/shm has 8 MiB free, 128 MiB are needed"), done.stderr


def test_a_limit_of_bodies_is_set_where_the_server_knows_one(environment):
    done = run([str(START)], {**environment, "KIMI_SHM_REGION_BYTES": "20971520"})
    assert "--http-max-input-size=10485760" in done.stdout, done.stdout + done.stderr
