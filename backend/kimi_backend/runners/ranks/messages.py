"""The messages in the pipe of a rank: an assignment, then steps, and questions that are answered."""

from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, TypedDict

import numpy as np
import torch

from kimi_backend.errors import KimiError
from kimi_backend.types import codec
from kimi_backend.types.plan import DraftPlan, TargetPlan

Pipe = Connection  # type: ignore[type-arg,unused-ignore]  # generic in some versions of the stubs only


READY, FAILED, ANSWER = "ready", "failed", "answer"
"""The answers of rank r, each with bytes or a text."""
CLOSE = "close"

EXPORT_AUX, OPEN_AUX, OPEN_SEMAPHORES = "export aux", "open aux", "open semaphores"
"""Questions to a rank."""


class WorkerError(KimiError):
    """Another rank could not do what it was asked."""


class Timeouts(TypedDict):
    """Seconds, of `process_group.join_ranks`."""

    join_timeout_s: float
    collective_timeout_s: float


TIMEOUTS = Timeouts(join_timeout_s=300.0, collective_timeout_s=7200.0)
"""One rank may read its weights much sooner than another. Ranks that end are noticed at once, whatever these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The first message to a rank."""

    parent_pid: int
    rank: int
    size: int
    address: str
    """The address at which rank 0 listens."""
    role: str
    """The role, as `loading.Role` has it."""
    settings: dict[str, Any]
    """The fields of `ServingSettings`."""

    def packed(self) -> dict[str, Any]:
        """The form for `Connection.send`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, and what of it travels beside its bytes."""

    plan: TargetPlan | DraftPlan
    aux: torch.Tensor | None = None
    """Aux hidden states on the host."""
    waits: tuple[tuple[int, int], ...] = ()
    """Shared semaphore and value of each that the stream waits for first."""

    def packed(self) -> Any:
        """The form for `Connection.send`."""
        aux = None
        if self.aux is not None:
            host = self.aux.contiguous().cpu()
            aux = host.view(torch.uint8).numpy(), str(host.dtype).removeprefix("torch.")
        return isinstance(self.plan, TargetPlan), codec.encode(self.plan), aux, self.waits


@dataclass(frozen=True, slots=True)
class Question:
    """Something that is answered with bytes."""

    name: str
    content: bytes

    def packed(self) -> Any:
        """The form for `Connection.send`."""
        return self.name, self.content


def unpacked(message: Any) -> Step | Question:
    """Unpack what `packed` gave."""
    if len(message) == 2:
        return Question(*message)
    is_target, buffer, aux, waits = message
    cls: Any = TargetPlan if is_target else DraftPlan
    plan = codec.decode(cls, np.asarray(buffer))
    if aux is None:
        return Step(plan, None, waits)
    rows, dtype = aux
    return Step(plan, torch.from_numpy(rows).view(getattr(torch, dtype)), waits)
