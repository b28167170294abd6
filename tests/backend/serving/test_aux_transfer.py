"""Aux hidden states between the runners' processes: in a shared buffer or as tensors, the text is the same.

The processes are one here: "opening" a handle looks the buffer up in a table. The driver's part is tested on a GPU
(`tests/backend/runners/test_aux_ipc.py`).
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.ranks.workers import NO_WORKERS
from kimi_backend.runners.step_runner import Launched
from kimi_backend.serving import draft_server, target_server, tensor_names
from kimi_backend.serving.aux_sharing import AuxReceiver, offer_aux_buffer
from kimi_backend.serving.aux_transfer import AuxTransfer
from kimi_backend.serving.bls_models import BlsDraft, BlsTarget
from kimi_backend.serving.draft_server import DraftServer
from kimi_backend.serving.target_server import TargetServer
from kimi_backend.types.plan import AuxHandle, DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness
from support.loopback_server import SECRET, LoopbackServer
from support.markov_models import markov_draft, markov_draft_config, markov_target
from support.tiny_configs import target_config
from support.tiny_runners import LIMITS, draft_runner, target_runner

AUX_LAYER_IDS = (1, 2, 3)
TARGET = target_config(num_hidden_layers=3)
DRAFT = markov_draft_config(TARGET, DraftOverrides(aux_layer_ids=AUX_LAYER_IDS))
PROMPTS = [(3, 5, 7, 2, 9), (1,) * 30, (4, 8)]


class SharingTarget:
    """A target whose every step leaves its aux hidden states in a buffer. NaN where the step wrote nothing."""

    table, device, workers, depth = None, torch.device("cpu"), NO_WORKERS, 0

    def __init__(self) -> None:
        self._runner = target_runner(TARGET, markov_target(TARGET), aux_layer_ids=AUX_LAYER_IDS).runner
        self.aux_buffer = AuxBuffer.allocate(
            2, LIMITS.max_num_batched_tokens, 3 * TARGET.hidden_size, torch.float32, torch.device("cpu")
        )

    def describe(self) -> RunnerDescription:
        return self._runner.describe()

    def launch(self, plan: TargetPlan) -> Launched[TargetReply]:
        reply = self._kept(self._runner.launch(plan).wait())
        return Launched(lambda: reply)

    def close(self) -> None:
        return None

    def _kept(self, reply: TargetReply) -> TargetReply:
        region = self.aux_buffer.take_region()
        rows = self.aux_buffer.region(region)
        rows.fill_(float("nan"))
        if reply.aux.tensor is None:
            return reply
        rows[: len(reply.aux.tensor)] = reply.aux.tensor
        return replace(reply, aux=AuxHandle(tensor=rows[: len(reply.aux.tensor)], region=region))


class WatchedDraft:
    """A draft that keeps the aux hidden states each step read, byte for byte."""

    table, device, workers, depth = None, torch.device("cpu"), NO_WORKERS, 0

    def __init__(self, seen: list[bytes]) -> None:
        self._runner = draft_runner(DRAFT, markov_draft(DRAFT, markov_target(TARGET), 0.1)).runner
        self._seen = seen

    def describe(self) -> RunnerDescription:
        return self._runner.describe()

    def launch(self, plan: DraftPlan) -> Launched[DraftReply]:
        self._seen.append(plan.aux.tensor[plan.aux_rows.tolist()].numpy().tobytes())  # type: ignore[index]
        return self._runner.launch(plan)

    def close(self) -> None:
        return None


class FoundBuffer:
    """Stands in for `OpenedAuxBuffer`."""

    def __init__(self, pair: "Pair", exported: bytes) -> None:
        self.exported = exported
        self.buffer = pair.buffers[exported]
        self._pair = pair
        pair.num_open += 1

    def close(self) -> None:
        self._pair.num_open -= 1


@dataclass
class Pair:
    """Both runners behind a loopback, and the engine over them."""

    server: LoopbackServer
    buffers: dict[bytes, AuxBuffer]
    seen: list[bytes] = field(default_factory=list)
    """The rows that the draft read, step by step."""
    num_open: int = 0
    can_open: bool = True

    def start(self, model: str) -> None:
        """Load one runner, or load it again: another epoch, an empty pool."""
        runner: Any = SharingTarget() if model == "kimi_target" else WatchedDraft(self.seen)
        made: Any = TargetServer if model == "kimi_target" else DraftServer
        self.server.servers[model] = made(runner, self.server.pb_utils, secret=SECRET)

    def offer(self, buffer: AuxBuffer | None, aux_transfer: str, *_: object) -> bytes | None:
        if buffer is None or aux_transfer == "tensor":
            return None
        handle = b"handle %d" % len(self.buffers)
        self.buffers[handle] = buffer
        return handle

    def open(self, handle: bytes, device: torch.device) -> FoundBuffer:
        if not self.can_open:
            raise CudaIpcError("planted")
        return FoundBuffer(self, handle)

    def engine(self) -> EngineHarness:
        transfer = AuxTransfer()
        harness = EngineHarness(
            BlsTarget(self.server.pb_utils, "kimi_target", transfer, secret=SECRET),
            BlsDraft(self.server.pb_utils, "eagle3_draft", transfer, secret=SECRET),
        )
        for index, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(seed=index, max_tokens=80, ignore_eos=True)
            harness.add(
                GenerateRequest(
                    request_id=str(index), prompt_token_ids=prompt, sampling=sampling, num_speculative_tokens=3
                )
            )
        return harness

    @property
    def num_tensors(self) -> int:
        """Calls of the draft that carried aux hidden states."""
        return self.server.num_carrying(tensor_names.AUX_HIDDEN_STATES)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    pair = Pair(LoopbackServer(), {})
    monkeypatch.setattr(target_server, "offer_aux_buffer", pair.offer)
    monkeypatch.setattr(
        draft_server,
        "AuxReceiver",
        lambda device, aux_transfer, **_: AuxReceiver(torch.device("cuda"), aux_transfer, pair.open),
    )
    return pair


def started(pair: Pair) -> Pair:
    for model in ("kimi_target", "eagle3_draft"):
        pair.start(model)
    return pair


def texts(harness: EngineHarness) -> list[list[int]]:
    assert all(outcome.rounds for outcome in harness.outcomes)
    return [outcome.token_ids for outcome in harness.outcomes]


@pytest.fixture
def expected(pair: Pair) -> list[list[int]]:
    """The tokens where aux hidden states travel as tensors."""
    pair.can_open = False
    harness = started(pair).engine()
    harness.run()
    assert pair.num_tensors > 10
    pair.server.calls.clear()
    pair.can_open = True
    return texts(harness)


def test_the_draft_reads_the_same_bytes_from_the_buffer_as_from_tensors(pair: Pair, expected: list[list[int]]) -> None:
    by_tensor = pair.seen.copy()
    pair.seen.clear()
    harness = started(pair).engine()
    harness.run()
    assert pair.num_tensors == 0
    assert not any(tensor_names.AUX_HIDDEN_STATES in outputs for _, _, outputs in pair.server.calls)
    assert pair.seen == by_tensor
    assert texts(harness) == expected


@pytest.mark.parametrize("model", ["kimi_target", "eagle3_draft"])
def test_a_restarted_runner_opens_anew(pair: Pair, expected: list[list[int]], model: str) -> None:
    harness = started(pair).engine()
    pair.server.calls.clear()
    harness.run(each_step=lambda step: pair.start(model) if step == 4 else None)
    assert [outcome.token_ids for outcome in harness.outcomes] == expected
    # A new target's first step may have asked for tensors before the draft opened the new buffer.
    assert pair.num_tensors <= 1
    draft = pair.server.servers["eagle3_draft"]
    last = sorted(pair.buffers)[-1]
    assert draft._receiver.open(last) == last
    if model == "kimi_target":
        assert pair.num_open == 1, "the buffer of the target that is gone stays mapped"


def test_a_draft_that_cannot_open_gets_tensors_and_says_so(
    pair: Pair, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    pair.can_open = False
    with caplog.at_level(logging.INFO, logger="kimi_backend.serving"):
        harness = started(pair).engine()
    harness.run()
    assert texts(harness) == expected
    assert "not opened: planted" in caplog.text
    assert "travel as tensors" in caplog.text


def test_a_new_targets_buffer_that_cannot_be_opened_costs_no_draft(
    pair: Pair, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    harness = started(pair).engine()
    pair.server.calls.clear()

    def restart(step: int) -> None:
        if step == 4:
            pair.can_open = False
            pair.start("kimi_target")

    harness.run(each_step=restart)
    assert [outcome.token_ids for outcome in harness.outcomes] == expected
    assert pair.num_tensors > 1
    assert pair.num_open == 0
    assert "runner=draft is gone" not in caplog.text


def test_a_draft_that_lost_its_buffer_refuses_a_region() -> None:
    receiver = AuxReceiver(torch.device("cuda"), "auto")
    with pytest.raises(InvalidRequestError, match=r"region: 0 given, but no buffer"):
        receiver.resolve(AuxHandle(region=0), 1)


def test_ipc_on_a_cpu_is_an_error_and_auto_is_not() -> None:
    buffer = AuxBuffer.allocate(1, 4, 8, torch.float32, torch.device("cpu"))
    assert offer_aux_buffer(buffer, "auto") is None
    assert offer_aux_buffer(None, "ipc") is None
    with pytest.raises(ConfigError, match="aux_transfer: ipc given, but the target runs on a CPU"):
        offer_aux_buffer(buffer, "ipc")
    assert AuxReceiver(torch.device("cpu"), "auto").open(b"x") is None
    with pytest.raises(ConfigError, match="aux_transfer: ipc given, but the runners are on a CPU"):
        AuxReceiver(torch.device("cpu"), "ipc")


@pytest.mark.parametrize(("handle", "problem"), [(None, "the target offers no buffer"), (b"x", "error 17")])
def test_a_draft_that_must_open_the_buffer_and_cannot_is_an_error(handle: bytes | None, problem: str) -> None:
    def refuse(handle: bytes, device: torch.device) -> None:
        raise CudaIpcError("error 17")

    assert AuxReceiver(torch.device("cuda"), "auto", refuse).open(handle) is None
    with pytest.raises(ConfigError, match=f"aux_transfer: ipc given, but {problem}; auto is allowed"):
        AuxReceiver(torch.device("cuda"), "ipc", refuse).open(handle)


def test_tensor_shares_nothing() -> None:
    buffer = AuxBuffer.allocate(1, 4, 8, torch.float32, torch.device("cpu"))
    assert offer_aux_buffer(buffer, "tensor") is None
    assert AuxReceiver(torch.device("cuda"), "tensor").open(b"x") is None
