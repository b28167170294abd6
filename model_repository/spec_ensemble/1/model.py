"""Triton Server's entry to the orchestrator; everything lives in `kimi_backend.serving`."""

from kimi_backend.serving.spec_ensemble_server import SpecEnsembleServer


class TritonPythonModel:
    def initialize(self, args):
        self.server = SpecEnsembleServer.from_model_args(args)

    def execute(self, requests):
        self.server.accept(requests)

    def finalize(self):
        self.server.close()
