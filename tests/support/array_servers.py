"""Runner servers on a CPU whose steps overlap as those on a GPU do: in static arrays, over an aux buffer that both
processes map, here from a file."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch

from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.graphs.recorder import EagerRecorder
from kimi_backend.runners.load import loading
from kimi_backend.serving import draft_server, target_server
from kimi_backend.serving.aux_sharing import AuxReceiver
from kimi_backend.serving.draft_server import DraftServer
from kimi_backend.serving.target_server import TargetServer
from kimi_backend.types.plan import DraftPlan

MODEL = """
import sys
sys.path.insert(0, {tests!r})
from support.array_servers import make_server


class TritonPythonModel:
    def initialize(self, args):
        self.server = make_server(args, {role!r}, {folder!r})

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
"""


def write_models(repository: Path, folder: Path) -> None:
    """Put such servers in place of both runners'. folder: for their buffers, and a line a draft step that
    overlapped."""
    for model, role in (("kimi_target", "target"), ("eagle3_draft", "draft")):
        text = MODEL.format(tests=str(Path(__file__).parents[1]), role=role, folder=str(folder))
        (repository / model / "1/model.py").write_text(text)


def num_overlapped(folder: Path) -> int:
    """The draft's steps so far that were launched behind a verify in flight."""
    file = folder / "overlapped"
    return len(file.read_text().splitlines()) if file.exists() else 0


class FileBuffer:
    """Stands in for `OpenedAuxBuffer`."""

    def __init__(self, exported: bytes, device: torch.device) -> None:
        self.exported = exported
        fields = json.loads(exported)
        self.buffer = _mapped(fields["path"], tuple(fields["shape"]))

    def close(self) -> None:
        return None


def _mapped(path: str, shape: tuple[int, ...]) -> AuxBuffer:
    size = functools.reduce(int.__mul__, shape)
    return AuxBuffer(torch.from_file(path, shared=True, size=size, dtype=torch.float32).view(shape))


def make_server(args: dict[str, str], role: str, folder: str) -> TargetServer | DraftServer:
    """Make the server in a model's `initialize`."""
    path = f"{folder}/aux-{os.getpid()}"

    def aux_buffer(model: Any, aux_layer_ids: tuple[int, ...], limits: Any, placement: Any) -> AuxBuffer:
        return _mapped(path, (1, limits.max_num_batched_tokens, len(aux_layer_ids) * model.config.hidden_size))

    def offer(buffer: AuxBuffer | None, aux_transfer: str, *_: object) -> bytes | None:
        return None if buffer is None else json.dumps({"path": path, "shape": list(buffer.tensor.shape)}).encode()

    def receiver(device: torch.device, aux_transfer: str, **_: object) -> AuxReceiver:
        return AuxReceiver(torch.device("cuda"), aux_transfer, FileBuffer)

    loading._recorder = lambda settings, placement: EagerRecorder()  # type: ignore[assignment, return-value]
    loading._aux_buffer = aux_buffer
    target_server.offer_aux_buffer = offer  # type: ignore[attr-defined]
    draft_server.AuxReceiver = receiver  # type: ignore[attr-defined, assignment, misc]
    if role == "target":
        return TargetServer.from_model_args(args)
    server = DraftServer.from_model_args(args)
    assert server._sync is not None
    launch = server._sync.launch

    def counted(plan: DraftPlan, *arguments: Any) -> Any:
        if plan.num_drawn.any():
            with Path(folder, "overlapped").open("a") as file:
                file.write("\n")
        return launch(plan, *arguments)

    server._sync.launch = counted  # type: ignore[method-assign]
    return server
