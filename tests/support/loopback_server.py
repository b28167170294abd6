"""The two runner servers behind Triton Server's call of one model by another, in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.runner_secret import SECRET_BYTES
from support import fake_pb_utils

if TYPE_CHECKING:
    from kimi_backend.serving.runner_server import RunnerServer


SECRET = bytes(range(SECRET_BYTES))
"""The secret of every loopback."""


class LoopbackServer:
    """Holds a `RunnerServer` a model; `pb_utils` calls them. Keeps which tensors each call carried."""

    def __init__(self) -> None:
        self.servers: dict[str, RunnerServer] = {}
        self.calls: list[tuple[str, list[str], list[str]]] = []
        """(model, names of the inputs beside the secret, names of the outputs) of each call."""
        self.pb_utils = SimpleNamespace(**vars(fake_pb_utils), InferenceRequest=self._request)

    def _request(self, *, model_name: str, requested_output_names: list[str], inputs: list[Any]) -> SimpleNamespace:
        request = SimpleNamespace(inputs=lambda: inputs, requested_output_names=lambda: requested_output_names)

        def execute() -> Any:
            (response,) = self.servers[model_name].run([request])
            outputs = [] if response.has_error() else [tensor.name() for tensor in response.output_tensors()]
            given = [tensor.name() for tensor in inputs if tensor.name() != names.SECRET]
            self.calls.append((model_name, given, outputs))
            return response

        request.exec = execute
        return request

    def num_carrying(self, tensor_name: str) -> int:
        """Calls that took or gave a tensor of this name with at least one byte."""
        return sum(tensor_name in inputs for _, inputs, _ in self.calls)
