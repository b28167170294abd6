"""Find what would keep a server from starting before it is started: `python -m kimi_backend.cli.preflight`.

`kimi serve` and docker/start.sh run it in a process of its own, which takes its CUDA context with it when it ends. It
reads the settings from the environment, as the models will, and writes what is wrong to stdout, with exit code 2;
warnings go to stderr.
"""

import os
import subprocess
import sys

from kimi_backend.config.chosen_configs import ChosenConfigs, check_gpus
from kimi_backend.config.known_variables import warnings_of_unknown
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError, KimiError
from kimi_backend.runners.ranks.divisible import check_divides

EXIT_BAD_INPUT = 2


def check(settings: ServingSettings) -> None:
    """Refuse what a model would refuse while it loads, before a weight is read: tokenizer and chat template, which need
    no torch, then settings, devices, names and shapes of all tensors, the plan of the memory.

    Raises:
        ConfigError, CheckpointError: the first thing that is wrong.
    """
    from kimi_backend.text.chat_template import load_chat_template
    from kimi_backend.text.tokenizer import load_tokenizer

    folder = settings.tokenizer or settings.checkpoint
    load_chat_template(folder, load_tokenizer(folder))
    from kimi_backend.runners.load.opened_checkpoints import check_servable

    check_servable(settings)


def check_quickly(settings: ServingSettings) -> None:
    """Check what needs no torch: that the configs fit each other and the ranks, and that there are GPUs enough.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    configs = ChosenConfigs.read(settings)
    check_divides(settings.tensor_parallel_size, configs.target, configs.draft)
    check_gpus(settings)


def check_beside(environment: dict[str, str]) -> None:
    """Run `check` in a process of its own.

    Args:
        environment: the variables that hold the settings.
    Raises:
        ConfigError: what is wrong, in the words of the process.
    """
    command = [sys.executable, "-m", "kimi_backend.cli.preflight"]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == EXIT_BAD_INPUT:
        raise ConfigError(done.stdout.strip())


def main() -> int:
    """Returns the exit code."""
    for line in warnings_of_unknown(os.environ):
        sys.stderr.write(f"{line}\n")
    try:
        settings = ServingSettings.from_parameters({}, os.environ)
        check_quickly(settings)
        check(settings)
    except KimiError as error:
        sys.stdout.write(f"{error}\n")
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
