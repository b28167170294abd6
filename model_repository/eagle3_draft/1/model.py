"""Triton Server's entry to the draft; everything lives in `kimi_backend.serving`."""

from kimi_backend.serving.runner_server import RunnerServer, load_draft


class TritonPythonModel:
    def initialize(self, args):
        self.server = RunnerServer.from_model_args(args, load_draft)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
