"""The choice of the torch that `make setup` installs. Run by the interpreter that the virtual environment is made from.

The kernels need Triton-language 3.6. A CUDA build of torch pins one: torch 2.11 pins 3.6, torch 2.13 pins 3.7. A CPU
build pins none. So the newest CPU build that the tests ran with is taken where pip's index has one, else torch 2.11:
pip then finds everything in one go, and downloads one torch.

    python scripts/choose_torch.py own           exit status 0: this interpreter has a torch that fits; 1: it has not
    python scripts/choose_torch.py PIP...        the requirement to install, after asking `PIP... index versions torch`
"""

import importlib.metadata
import json
import re
import subprocess
import sys

OLDEST, NEWEST = (2, 11), (2, 13)
"""Versions of torch that the tests ran with."""
WITH_CUDA = "torch==2.11.0"
TRITON = "3.6"


def fits(version: str, requirements: list[str]) -> bool:
    """Tell whether an installed torch can stay. requirements: those of its metadata, such as `triton==3.6.0; ...`."""
    pinned = [match[1] for line in requirements if (match := re.match(r"triton\s*\(?==\s*([\d.]+)", line))]
    return _number(version) >= OLDEST and all(pin.startswith(TRITON + ".") for pin in pinned)


def requirement(versions: list[str]) -> str:
    """The torch to install from an index that has these versions, newest first."""
    of_cpu = [v for v in versions if v.endswith("+cpu") and OLDEST <= _number(v) <= NEWEST]
    return f"torch=={of_cpu[0]}" if of_cpu else WITH_CUDA


def _number(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _own_torch_fits() -> bool:
    try:
        own = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return fits(own.version, own.requires or [])


def main(arguments: list[str]) -> int:
    if arguments == ["own"]:
        return 0 if _own_torch_fits() else 1
    answer = subprocess.run(
        [*arguments, "index", "versions", "torch", "--json"], check=True, stdout=subprocess.PIPE, text=True
    )
    sys.stdout.write(requirement(json.loads(answer.stdout)["versions"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
