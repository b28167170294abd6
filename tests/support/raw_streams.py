"""Streams through tritonclient itself, so that what our client hides can be looked at."""

import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from kimi_backend.hosting.embedded_server import EmbeddedServer
from support.waiting import PATIENCE_S


def raw_input(name: str, array: Any, datatype: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def secret_input(server: EmbeddedServer) -> grpcclient.InferInput:
    """The secret that a runner of this server asks its caller for."""
    assert server.runner_secret_file is not None
    return raw_input("SECRET", np.frombuffer(server.runner_secret_file.read_bytes(), np.uint8), "UINT8")


def text_input(text: str | bytes) -> grpcclient.InferInput:
    return raw_input("text_input", np.array([[text]], dtype=np.object_), "BYTES")


class RawStream:
    """One gRPC stream that may carry many requests, without the header that turns errors into statuses."""

    def __init__(self, url: str) -> None:
        self.client = grpcclient.InferenceServerClient(url)
        self._arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self._arrived.put((result, error)))

    def send(
        self, request_id: str, inputs: Sequence[grpcclient.InferInput], parameters: Mapping[str, Any] | None = None
    ) -> None:
        self.client.async_stream_infer(
            "spec_ensemble",
            list(inputs),
            request_id=request_id,
            enable_empty_final_response=True,
            parameters=dict(parameters or {}),
        )

    def next(self, timeout_s: float = PATIENCE_S) -> tuple[Any, Any]:
        """(result, error) of the next response."""
        return self._arrived.get(timeout=timeout_s)

    def until_final(self, num_requests: int, timeout_s: float = PATIENCE_S) -> tuple[dict[str, list[Any]], list[Any]]:
        """Responses of each request in order of arrival, until so many requests have ended; and errors."""
        results: dict[str, list[Any]] = {}
        errors = []
        deadline = time.monotonic() + timeout_s
        num_ended = 0
        while num_ended < num_requests:
            result, error = self.next(max(0.1, deadline - time.monotonic()))
            if error is not None:
                errors.append(error)
                num_ended += 1
                continue
            response = result.get_response()
            results.setdefault(response.id, []).append(result)
            num_ended += response.parameters["triton_final_response"].bool_param
        return results, errors

    def is_quiet(self, for_s: float = 0.5) -> bool:
        """Nothing more arrives."""
        try:
            self._arrived.get(timeout=for_s)
        except queue.Empty:
            return True
        return False

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()
