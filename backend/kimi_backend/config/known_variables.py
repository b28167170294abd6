"""Every KIMI_* variable that something reads, and a word about others: a misspelt one would do nothing, silently."""

import dataclasses
import difflib
from collections.abc import Iterable

from kimi_backend.config.removed_settings import FORMER_NAMES, REMOVED_SETTINGS
from kimi_backend.config.settings import ENVIRONMENT_PREFIX, ServingSettings

_START_SCRIPT = (
    "HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "MODEL_REPOSITORY", "ADMIN_SECRET", "SHM_REGION_BYTES",
    "CUDA_POOL_BYTES", "EXIT_TIMEOUT_S", "RUNNER_SECRET_FILE", "SMOKE_TIMEOUT_S", "TRITON_ARGS",
)  # fmt: skip
_ENDPOINT = (
    "API_KEY", "API_KEYS_FILE", "OPENAI_NAMES", "OPENAI_PORT", "OPENAI_ACCESS_LOG", "OPENAI_LOG_FORMAT",
    "OPENAI_OTLP_ENDPOINT",
)  # fmt: skip
_COMPOSE = (
    "IMAGE", "DEMO_DIR", "CHECKPOINT_DIR", "DRAFT_DIR", "GPU", "GPUS", "BIND", "SHM_SIZE", "STOP_GRACE_PERIOD",
)  # fmt: skip
"""Names of docker/.env, which a shell may have exported."""
OTHER_VARIABLES = frozenset(ENVIRONMENT_PREFIX + name for name in (*_START_SCRIPT, *_ENDPOINT, *_COMPOSE))
"""Those that are no settings of the models."""


def warnings_of_unknown(names: Iterable[str]) -> list[str]:
    """A line for each KIMI_* name that nothing reads, with the nearest one that is read.

    Args:
        names: of an environment's variables.
    """
    settings = [field.name for field in dataclasses.fields(ServingSettings)]
    known = {
        ENVIRONMENT_PREFIX + name.upper() for name in (*settings, *FORMER_NAMES.values(), *REMOVED_SETTINGS)
    } | OTHER_VARIABLES
    lines = []
    for name in sorted(n for n in names if n.startswith(ENVIRONMENT_PREFIX) and n not in known):
        near = difflib.get_close_matches(name, known, n=1)
        lines.append(f"warning: the variable {name} is not known, nothing reads it{f': {near[0]}?' if near else ''}")
    return lines
