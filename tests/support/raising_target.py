"""A model repository whose target raises in every step while a file is there."""

import shutil
from pathlib import Path

from kimi_backend.hosting.settings_to_server import find_model_repository

MODEL = """
from pathlib import Path

from kimi_backend.serving.target_server import TargetServer


class FaultyServer(TargetServer):
    def _launch(self, plan):
        if Path({trigger!r}).exists():
            raise RuntimeError("planted fault")
        super()._launch(plan)


class TritonPythonModel:
    def initialize(self, args):
        self.server = FaultyServer.from_model_args(args)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
"""


def write_repository(folder: Path, trigger: Path) -> Path:
    """A copy of the model repository at `folder`, with such a target."""
    shutil.copytree(find_model_repository(), folder)
    (folder / "kimi_target/1/model.py").write_text(MODEL.format(trigger=str(trigger)))
    return folder
