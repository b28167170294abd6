"""A model repository whose target does what a test says: it takes its time for every step, or raises in it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from kimi_backend.hosting.settings_to_server import find_model_repository

SLOW_STEP_S = 0.03
"""The longest request of the tests' servers takes ten seconds then: nobody who wants to end it comes too late."""
MODEL = """
import time
from pathlib import Path

from kimi_backend.serving.target_server import TargetServer


class SteeredServer(TargetServer):
    def _launch(self, plan):
        if Path({raising!r}).exists():
            raise RuntimeError("planted fault")
        if Path({slow!r}).exists():
            time.sleep({slow_step_s})
        super()._launch(plan)


class TritonPythonModel:
    def initialize(self, args):
        self.server = SteeredServer.from_model_args(args)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
"""


class SteeredTarget:
    """The target of a repository that this writes."""

    def __init__(self, folder: Path) -> None:
        """folder: for the files that tell the target what to do, and for the repository."""
        self._raising, self._slow = folder / "raising", folder / "slow"
        self.repository = folder / "models"
        shutil.copytree(find_model_repository(), self.repository)
        model = MODEL.format(raising=str(self._raising), slow=str(self._slow), slow_step_s=SLOW_STEP_S)
        (self.repository / "kimi_target/1/model.py").write_text(model)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Every step raises."""
        with _there(self._raising):
            yield

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """No step takes less than SLOW_STEP_S."""
        with _there(self._slow):
            yield


@contextlib.contextmanager
def _there(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink()
