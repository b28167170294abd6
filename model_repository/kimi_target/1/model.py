"""Triton Server's entry to the target; everything lives in `kimi_backend.serving`."""

from kimi_backend.serving.runner_server import RunnerServer, load_target


class TritonPythonModel:
    def initialize(self, args):
        self.server = RunnerServer.from_model_args(args, load_target)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
