"""Settings that are gone: one that is still given fails by its name, with what to do instead.

python -m kimi_backend.config.removed_settings      0, or 2 and the reason, of this process's environment
"""

import os
import sys
from collections.abc import Mapping

from kimi_backend.errors import ConfigError

ENVIRONMENT_PREFIX = "KIMI_"

REMOVED_SETTINGS = {
    "mps": "leave it out: no CUDA MPS daemon is started any more, as rounds are not shorter under one",
}
"""Name -> what to do instead."""


def refuse_removed(parameters: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """
    Args:
        parameters: settings by name, as of config.pbtxt or a command line; an empty value is none.
        environment: usually `os.environ`; likewise.

    Raises:
        ConfigError: a setting that is gone is given.
    """
    for name, instead in REMOVED_SETTINGS.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        given = name if parameters.get(name) else variable if environment.get(variable) else None
        if given is not None:
            raise ConfigError(f"setting {given} was removed: {instead}")


if __name__ == "__main__":
    try:
        refuse_removed({}, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
