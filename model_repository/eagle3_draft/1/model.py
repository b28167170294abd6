"""Triton Server's entry to the draft; everything lives in `kimi_backend.serving`."""

from kimi_backend.serving.draft_server import DraftServer


class TritonPythonModel:
    def initialize(self, args):
        self.server = DraftServer.from_model_args(args)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
