"""Settings that are gone, and such as have another name now. One that is gone and still given stops the server by its
name: `ServingSettings.from_parameters`."""

REMOVED_SETTINGS = {
    "gpu": "KIMI_GPUS says how many GPUs the container gets; docs/operations.md has how to name them",
    "mps": "leave it out: no CUDA MPS daemon is started any more, as rounds are not shorter under one",
}
"""Name -> what to do instead."""
FORMER_NAMES = {"async_scheduling": "launch_ahead", "shared_semaphores": "step_board"}
"""Name -> the one that it had before, which is still read."""
