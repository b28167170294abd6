"""Step costs kept on disk beside Triton's compile cache, under a key of all that they depend on."""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import kimi_backend
import kimi_kernels
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import InvalidRequestError
from kimi_backend.types.step_costs import StepCosts

logger = logging.getLogger("kimi_backend.runners")

FOLDER = "kimi_step_costs"
_CARD_FIELDS = "name,driver_version,power.limit,clocks.max.sm,clocks.max.mem,clocks.applications.graphics"
_NO_COST = frozenset({"drain_file", "drain_timeout_s", "log_level", "metrics_interval_s", "target_patience_s"})
"""Settings that change no step."""


def costs_folder() -> Path:
    """The folder in which costs are kept, beside that of compiled kernels."""
    compiled = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(compiled).parent / FOLDER


@dataclasses.dataclass(frozen=True, slots=True)
class CostFile:
    """The costs of one model's steps, with these settings on this machine."""

    about: dict[str, Any]
    """The values that costs depend on."""

    @classmethod
    def of(cls, role: str, settings: ServingSettings, model: Any, device: torch.device) -> "CostFile":
        """model: the model's configuration, as `repr` shows it."""
        about = {"role": role, **machine(device), "code": code_digest(), "model": repr(model)}
        return cls({**about, "settings": given_settings(settings)})

    @property
    def path(self) -> Path:
        """The path at which the file is, or would be."""
        key = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()
        return costs_folder() / f"{key[:32]}.json"

    def read(self) -> StepCosts | None:
        """The costs that are kept; None where nothing is, or nothing that can be used."""
        try:
            return read_costs(self.path)[1]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, InvalidRequestError) as error:
            logger.warning("step costs are measured again: %s: %s", self.path, error)
            return None

    def write(self, costs: StepCosts) -> None:
        """Keep them. A folder that cannot be written is logged: they are measured at every start then."""
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"about": self.about, "costs": json.loads(costs.to_json())}), encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            logger.warning("step costs are not kept: %s", error)
            with suppress(OSError):
                part.unlink(missing_ok=True)


def given_settings(settings: ServingSettings) -> dict[str, Any]:
    """The settings that costs depend on; folders by their whole paths."""
    given = {name: value for name, value in dataclasses.asdict(settings).items() if name not in _NO_COST}
    for name in ("checkpoint", "draft"):
        given[name] = str(Path(given[name]).resolve()) if given[name] else ""
    return given


def newest_costs(role: str, given: dict[str, Any]) -> tuple[dict[str, Any], StepCosts] | None:
    """(about, costs) that this version kept last for a model under settings that include `given`; None where it kept
    none."""
    found = []
    for path in costs_folder().glob("*.json"):
        with suppress(OSError, ValueError, InvalidRequestError):
            about, costs = read_costs(path)
            has_given = given.items() <= about["settings"].items() if isinstance(about.get("settings"), dict) else False
            if about.get("role") == role and about.get("code") == code_digest() and has_given:
                found.append((path.stat().st_mtime, about, costs))
    return max(found, key=lambda item: item[0])[1:] if found else None


def read_costs(path: Path) -> tuple[dict[str, Any], StepCosts]:
    """(about, costs) of a file.

    Raises:
        OSError, ValueError, InvalidRequestError: it cannot be read, or holds something else.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("about"), dict):
        raise ValueError("no step costs")
    return content["about"], StepCosts.from_json(json.dumps(content.get("costs")))


def machine(device: torch.device) -> dict[str, str]:
    """The card with its limits, or the processor, and what computes on it."""
    about = {"torch": torch.__version__, "triton": metadata.version("triton"), "host": platform.node()}
    if device.type != "cuda":
        return {**about, "device": f"{_processor()}, {os.cpu_count()} cores"}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={_CARD_FIELDS}", "--format=csv,noheader"]
    try:
        card = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        card = torch.cuda.get_device_name(device)  # without its limits and driver: the best that is known
    return {**about, "device": card, "cuda": str(torch.version.cuda)}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def code_digest() -> str:
    """A digest of all source files that a step's time may depend on."""
    digest = hashlib.sha256()
    for package in (kimi_kernels, kimi_backend):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
