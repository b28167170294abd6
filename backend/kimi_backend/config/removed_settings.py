"""Settings and values that are gone, and settings that have another name now. What is gone and still given stops the
server by its name: `ServingSettings`."""

REMOVED_SETTINGS = {
    "gpu": "KIMI_GPUS says how many GPUs the container gets; docs/operations.md has how to name them",
    "mps": "leave it out: no CUDA MPS daemon is started any more, as rounds are not shorter under one",
}
"""Name -> what to do instead."""
REMOVED_VALUES = {
    ("kernels", "reference"): "write 'plain', whose rows do not depend on each other either",
    ("kernels", "cpu"): "write 'plain', or 'auto', which takes it on a CPU",
}
"""(Setting, value) -> what to do instead."""
FORMER_NAMES = {"async_scheduling": "launch_ahead", "shared_semaphores": "step_board"}
"""Name -> the one that it had before, which is still read."""
