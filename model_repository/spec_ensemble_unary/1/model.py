"""Triton Server's entry to the orchestrator's unary twin; everything lives in `kimi_backend.serving`."""

from kimi_backend.serving.unary_server import UnaryServer


class TritonPythonModel:
    def initialize(self, args):
        self.server = UnaryServer.from_model_args(args)

    def execute(self, requests):
        return self.server.accept(requests)

    def finalize(self):
        self.server.close()
