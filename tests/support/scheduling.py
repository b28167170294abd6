"""The tests of `make test` that share a process, and those that begin.

Tests that wait for servers begin, so that nothing is left at the end but what keeps every core busy; long files follow,
so that no process is left with one of them when the others have ended.
"""

from pathlib import Path, PurePosixPath

TESTS = Path(__file__).parents[1]
BREAKING = {"test_recovery", "test_storm"}
"""Files of tests/server that share `server_to_break`."""
ALONE = ("test_documented_commands", "test_start_script", "test_watchdog", "test_shared_semaphores", "test_shutdown")
"""Files of tests/server that start what they need themselves, the longest first; the others share `server`."""
LONG = (
    "demo/test_acceptance.py",
    "kernels/test_compile_gate.py",
    "backend/serving/test_hand_over.py",
    "backend/runners/ranks/test_two_ranks.py",
    "backend/models/test_sharded_kernels.py",
    "backend/engine/test_overlap.py",
    "kernels/sampling/test_kernel.py",
    "kernels/test_compile_gate_moe.py",
    "kernels/moe_experts/test_moe_experts.py",
    "backend/engine/test_exactness.py",
    "backend/engine/test_distribution.py",
    "backend/spec_decode/test_adaptive_policy.py",
    "backend/runners/graphs/test_token_table.py",
    "kernels/mla_decode/test_mla_decode.py",
    "kernels/test_compile_gate_sampling.py",
)
"""The longest of the other files, by processor time."""
assert all((TESTS / name).exists() for name in LONG)


def scope_of(nodeid: str) -> str:
    """Tests of one scope run in one process, one after another."""
    path = PurePosixPath(nodeid.split("::")[0])
    if path.parent.name != "server" or path.stem in ALONE:
        return str(path)
    return "breaking" if path.stem in BREAKING else "common"


def turn_of(nodeid: str) -> int:
    """The place of a test's scope in the queue."""
    scope = scope_of(nodeid)
    path = PurePosixPath(scope)
    if scope in ("common", "breaking"):
        return ("common", "breaking").index(scope)
    if path.parent.name == "server":
        return 2 + ALONE.index(path.stem)
    begins = 2 + len(ALONE)
    return next((begins + turn for turn, name in enumerate(LONG) if scope.endswith(name)), begins + len(LONG))
