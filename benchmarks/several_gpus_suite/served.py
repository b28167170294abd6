"""kimi-nano on N ranks through the server: texts, killed ranks, reload. The tests of the repository, at N ranks."""

from pathlib import Path

from several_gpus_suite.verdict import Verdict, run_command

MOST_RANKS = 4
"""kimi-nano's experts are 128 wide in int4 groups of 32, the tests' checkpoint on a CPU has four heads."""
ON_GPUS, ON_A_CPU = "tests/server/test_two_gpus.py", "tests/server/test_tensor_parallel.py"


def run(num_ranks: int, *, is_cpu: bool, out: Path) -> Verdict:
    """Run them with `KIMI_TEST_RANKS`, and ask that they pass."""
    del out
    verdict, num_ranks = Verdict(), min(num_ranks, MOST_RANKS)
    verdict.tell(f"its models are divided by {num_ranks} ranks, {MOST_RANKS} at most")
    tests = ON_A_CPU if is_cpu else ON_GPUS
    options = ["-m", "pytest", "-x", "-q", "-m", "not gpu" if is_cpu else "gpu", tests]
    status = run_command(options, KIMI_TEST_RANKS=str(num_ranks))
    verdict.ask(status == 0, f"{tests} at {num_ranks} ranks: texts, killed ranks, reload (status {status})")
    return verdict
