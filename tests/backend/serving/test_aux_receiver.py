"""A draft opens the target's memory, is timed with it, and reads rows that were sent; a runner tells its costs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.errors import InvalidRequestError, ModelUnavailableError
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_sharing import AuxReceiver
from kimi_backend.serving.aux_transfer import AuxTransfer
from kimi_backend.serving.bls_models import BlsDraft, BlsTarget
from kimi_backend.serving.draft_server import DraftServer, _aux_from_bytes
from kimi_backend.types.plan import AuxHandle
from support import fake_pb_utils
from support.loopback_server import SECRET
from support.made_up_costs import linear_costs

CUDA = torch.device("cuda")
COSTS = linear_costs(3000, 40)


class Buffers:
    """Opens buffers of four rows a region and keeps what is open."""

    def __init__(self) -> None:
        self.open_now: list[bytes] = []
        self.num_opened = 0

    def open(self, handle: bytes, device: torch.device) -> Any:
        self.open_now.append(handle)
        self.num_opened += 1
        rows = torch.arange(8.0).reshape(4, 2)
        buffer = SimpleNamespace(num_regions=3, resolve=lambda aux: rows)
        return SimpleNamespace(exported=handle, buffer=buffer, close=lambda: self.open_now.remove(handle))


def test_one_buffer_is_open_at_a_time_and_the_same_one_is_not_opened_again() -> None:
    buffers = Buffers()
    receiver = AuxReceiver(CUDA, "auto", open_buffer=buffers.open)
    assert receiver.num_regions == 0
    with pytest.raises(InvalidRequestError, match="no buffer of the target's is open"):
        receiver.resolve(AuxHandle(region=1), 2)
    assert receiver.open(b"one") == receiver.open(b"one") == b"one"
    assert (buffers.num_opened, receiver.num_regions) == (1, 3)
    assert receiver.resolve(AuxHandle(region=1), 3).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert receiver.open(b"two") == b"two"
    assert buffers.open_now == [b"two"]
    assert receiver.open(None) is None
    receiver.close()
    assert (buffers.open_now, receiver.num_regions) == ([], 0)


class Timed:
    """A draft that says which aux hidden states it is timed with."""

    def __init__(self) -> None:
        self.timing_aux: AuxHandle | None = None
        self.timed_with: list[AuxHandle | None] = []

    def measure_costs(self) -> Any:
        self.timed_with.append(self.timing_aux)
        return COSTS


@pytest.mark.parametrize("is_open", [True, False])
def test_a_draft_is_timed_with_the_buffer_that_steps_read(is_open: bool) -> None:
    receiver = AuxReceiver(CUDA, "auto", open_buffer=Buffers().open)
    if is_open:
        receiver.open(b"one")
    draft, server = Timed(), object.__new__(DraftServer)
    server._receiver, server._most_rows = receiver, 2
    server._draft = server._runner = draft  # type: ignore[assignment]
    assert server._measure_costs() is COSTS
    (aux,) = draft.timed_with
    assert draft.timing_aux is None
    assert (aux is not None) is is_open
    if aux is not None:
        assert aux.tensor is not None
        assert (aux.region, aux.tensor.shape) == (0, (2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_were_sent_are_bytes_of_either_dtype(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.5, -2.0, 3.0]], dtype=dtype)
    assert torch.equal(_aux_from_bytes(rows.view(torch.uint8), 3), rows)


@pytest.mark.parametrize("num_bytes", [0, 3, 7, 9, 24])
def test_rows_of_another_width_are_refused(num_bytes: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"rows of {num_bytes} bytes given, 6 \(bf16\) or 12 \(float32\)"):
        _aux_from_bytes(torch.zeros(1, num_bytes, dtype=torch.uint8), 3)


class Model:
    """Server utilities over one model, which answers with a tensor or fails."""

    def __init__(self, name: str = "", text: str = "", *, fails: bool = False) -> None:
        self.asked: list[list[str]] = []
        tensors = [fake_pb_utils.Tensor(name, np.array([text], dtype=np.object_))] if name else []

        def execute() -> fake_pb_utils.InferenceResponse:
            if fails:
                raise fake_pb_utils.TritonModelException("it has died")
            return fake_pb_utils.InferenceResponse(tensors)

        def request(inputs: list[Any], **_: Any) -> SimpleNamespace:
            self.asked.append([tensor.name() for tensor in inputs])
            return SimpleNamespace(exec=execute)

        self.utilities = SimpleNamespace(**vars(fake_pb_utils), InferenceRequest=request)


@pytest.mark.parametrize("kind", [BlsTarget, BlsDraft])
def test_a_runner_is_asked_to_time_its_steps(kind: type[BlsTarget | BlsDraft]) -> None:
    model = Model(names.STEP_COSTS, COSTS.to_json())
    assert kind(model.utilities, "some_model", AuxTransfer(), secret=SECRET).measure_costs() == COSTS
    assert names.TIME_STEPS in model.asked[0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(names.STEP_COSTS, "{}"), "runner some_model: step costs do not fit this version"),
        (Model("another", "{}"), "runner some_model: reply lacks output"),
        (Model(fails=True), "runner some_model: it has died"),
    ],
)
def test_a_runner_that_does_not_answer_so_is_away(model: Model, message: str) -> None:
    with pytest.raises(ModelUnavailableError, match=message):
        BlsTarget(model.utilities, "some_model", AuxTransfer(), secret=SECRET).measure_costs()
