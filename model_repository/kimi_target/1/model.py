"""Triton Server's entry to the target; everything lives in `kimi_backend.serving`."""

from kimi_backend.serving.target_server import TargetServer


class TritonPythonModel:
    def initialize(self, args):
        self.server = TargetServer.from_model_args(args)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
