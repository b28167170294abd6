"""The command that `kimi bench` runs Triton's perf_analyzer by."""

from pathlib import Path

import pytest

from kimi_backend.cli.perf_analyzer import run_perf_analyzer
from kimi_backend.errors import KimiError


def test_the_models_version_is_told_and_a_failure_is_quoted(tmp_path: Path) -> None:
    """Looking for a version fails by chance: see `run_perf_analyzer`."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "given: $*"\nexit 3\n')
    program.chmod(0o755)
    told = r"code 3: given: -m spec_ensemble -x 1 .*--concurrency-range=2 --request-count=1"
    with pytest.raises(KimiError, match=told):
        run_perf_analyzer(str(program), "localhost:1", [{"text_input": "def f"}], concurrency=2)
