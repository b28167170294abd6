"""A draft's server behind Triton Server that notes which of its steps overlap."""

from pathlib import Path
from typing import Any

from kimi_backend.serving.draft_server import DraftServer
from kimi_backend.types.plan import DraftPlan

MODEL = """
import sys
sys.path.insert(0, {tests!r})
from support.counting_servers import make_draft_server


class TritonPythonModel:
    def initialize(self, args):
        self.server = make_draft_server(args, {folder!r})

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
"""


def write_model(repository: Path, folder: Path) -> None:
    """Put such a server in place of the draft's. folder: for a line a step that overlapped."""
    text = MODEL.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    (repository / "eagle3_draft/1/model.py").write_text(text)


def num_overlapped(folder: Path) -> int:
    """The draft's steps so far that were launched behind a verify in flight."""
    file = folder / "overlapped"
    return len(file.read_text().splitlines()) if file.exists() else 0


def make_draft_server(args: dict[str, str], folder: str) -> DraftServer:
    """Make the server in the model's `initialize`."""
    server = DraftServer.from_model_args(args)
    assert server._side is not None
    run = server._side.run

    def counted(plan: DraftPlan, *arguments: Any) -> Any:
        if plan.num_drawn.any():
            with Path(folder, "overlapped").open("a") as file:
                file.write("\n")
        return run(plan, *arguments)

    server._side.run = counted  # type: ignore[method-assign]
    return server
