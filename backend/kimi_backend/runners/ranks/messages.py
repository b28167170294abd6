"""What goes through the pipe of a rank: an assignment, then steps, and questions that are answered."""

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, TypedDict

import numpy as np
import torch

from kimi_backend.types import codec
from kimi_backend.types.plan import DraftPlan, TargetPlan

Pipe = Connection  # type: ignore[type-arg,unused-ignore]  # generic in some versions of the stubs only


READY, FAILED, ANSWER = "ready", "failed", "answer"
"""What rank r says, each with bytes or a text."""
CLOSE = "close"


class Timeouts(TypedDict):
    """Seconds, of `joining.join_ranks`."""

    join_timeout_s: float
    collective_timeout_s: float


TIMEOUTS = Timeouts(join_timeout_s=300.0, collective_timeout_s=7200.0)
"""One rank may read its weights much sooner than another. Ranks that end are noticed at once, whatever these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a rank is told first."""

    parent_pid: int
    rank: int
    size: int
    address: str
    """Where rank 0 listens."""
    role: str
    """As `loading.Role` has it."""
    settings: dict[str, Any]
    """Of `ServingSettings`."""

    def packed(self) -> dict[str, Any]:
        """For `Connection.send`."""
        return asdict(self)


class Method(str, enum.Enum):
    """Steps by the runner's method that runs them."""

    VERIFY = "verify"
    LAUNCH = "launch"
    PROPOSE = "propose"
    FOLLOW = "follow"


_PLANS: dict[Method, type[TargetPlan] | type[DraftPlan]] = {
    Method.VERIFY: TargetPlan,
    Method.LAUNCH: TargetPlan,
    Method.PROPOSE: DraftPlan,
    Method.FOLLOW: DraftPlan,
}


@dataclass(frozen=True, slots=True)
class Step:
    """A plan without what only a device holds."""

    method: Method
    plan: TargetPlan | DraftPlan
    aux: torch.Tensor | None = None
    """On the host."""
    shared: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Shapes and types of what rank 0 shares (`peers.share`)."""
    waits: tuple[tuple[int, int], ...] = ()
    """Offset and value of each number that the stream waits for first."""

    def packed(self) -> Any:
        """For `Connection.send`."""
        aux = None
        if self.aux is not None:
            host = self.aux.contiguous().cpu()
            aux = host.view(torch.uint8).numpy(), str(host.dtype).removeprefix("torch.")
        return self.method.value, codec.encode(self.plan), aux, self.shared, self.waits


@dataclass(frozen=True, slots=True)
class Question:
    """Something that is answered with bytes."""

    name: str
    content: bytes

    def packed(self) -> Any:
        """For `Connection.send`."""
        return self.name, self.content


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """For `Step.shared`."""
    return tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)


def unpacked(message: Any) -> Step | Question:
    """What `packed` gave."""
    if len(message) == 2:
        return Question(*message)
    method, buffer, aux = Method(message[0]), np.asarray(message[1]), message[2]
    shared, waits = message[3:]
    plan: TargetPlan | DraftPlan
    cls: Any = _PLANS[method]
    plan = codec.decode(cls, buffer)
    if aux is None:
        return Step(method, plan, None, shared, waits)
    rows, dtype = aux
    return Step(method, plan, torch.from_numpy(rows).view(getattr(torch, dtype)), shared, waits)
