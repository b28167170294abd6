"""Settings that are gone. One that is still given stops the server by its name: `ServingSettings.from_parameters`."""

REMOVED_SETTINGS = {
    "mps": "leave it out: no CUDA MPS daemon is started any more, as rounds are not shorter under one",
}
"""Name -> what to do instead."""
