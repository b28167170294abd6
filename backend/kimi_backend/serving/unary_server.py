"""`spec_ensemble_unary`: `spec_ensemble` for clients that take one response, such as tritonclient's `infer`.

It checks nothing that `spec_ensemble` checks: fields, their limits, the queue's length and a request's time are looked
at there, once. Triton Server 24.10 cannot cancel a call between models, so a request whose client has left runs until
it ends by itself or its `timeout_s` is over.
"""

import json
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kimi_backend.config.settings import MOST_UNARY_CALLS, ServingSettings
from kimi_backend.errors import CapacityError, InvalidRequestError, KimiError, ModelUnavailableError
from kimi_backend.serving.bytes_inputs import limit_decoding
from kimi_backend.serving.descriptions import model_parameters
from kimi_backend.serving.incoming import copied_tensors, parameters_text, read_parameters, request_name
from kimi_backend.serving.request_fields import is_servers_own
from kimi_backend.serving.triton_errors import CODES, coded_error, error_response, forward_logs, triton_error

logger = logging.getLogger("kimi_backend.serving")

ORCHESTRATOR = "spec_ensemble"
_NOT_READY = "not ready"


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of a call of `spec_ensemble`: copies, since the server takes a request's memory back early."""

    request_id: str
    arrays: "dict[str, np.ndarray[Any, Any]]"
    """Emptied once they have been sent."""
    parameters: Mapping[str, "bool | int | str"]
    outputs: tuple[str, ...]


def read_call(request: Any) -> Call:
    """Copy a request.

    Raises:
        InvalidRequestError: it asks for a stream, a list is too long, or its parameters cannot be read or handed on.
    """
    arrays, parameters = copied_tensors(request.inputs()), read_parameters(parameters_text(request))
    for place in (arrays, parameters):
        if (stream := place.pop("stream", None)) is not None and np.any(stream):
            raise InvalidRequestError(f"stream: true given, this model answers once; {ORCHESTRATOR} streams")
    outputs = tuple(request.requested_output_names())
    return Call(request_name(request), arrays, _passed_on(arrays, parameters), outputs)


def _passed_on(arrays: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, bool | int | str]:
    """The parameters of a call between models, which may be no floats: those go into `sampling_parameters`.

    `stream` is said once here; in `sampling_parameters` it would be a second time, which is refused.
    """
    given = {name: value for name, value in parameters.items() if not is_servers_own(name)}
    floats = {name: value for name, value in given.items() if not isinstance(value, (bool, int, str))}
    if floats:
        if "sampling_parameters" in arrays or "sampling_parameters" in given:
            name = next(iter(floats))
            raise InvalidRequestError(f"{name}: given beside sampling_parameters, as a parameter; put it in there")
        given = {name: value for name, value in given.items() if name not in floats}
        given["sampling_parameters"] = json.dumps(floats)
    return {**given, "stream": False}


class UnaryServer:
    """Hands each request on at once and answers it from a thread when `spec_ensemble` has."""

    def __init__(self, pb_utils: Any) -> None:
        self._pb = pb_utils
        self._free = threading.Semaphore(MOST_UNARY_CALLS)
        self._threads = ThreadPoolExecutor(MOST_UNARY_CALLS, thread_name_prefix="unary")

    @classmethod
    def from_model_args(cls, args: dict[str, str]) -> "UnaryServer":
        """Read the settings of the log."""
        import triton_python_backend_utils as pb_utils

        settings = ServingSettings.from_parameters(model_parameters(args), os.environ)
        forward_logs(pb_utils, settings.log_level)
        limit_decoding(pb_utils)
        return cls(pb_utils)

    def accept(self, requests: list[Any]) -> list[None]:
        """Start each request. None in a request's place: its response comes later, by its sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(sender, request)
            except Exception as error:
                self._send(sender, error_response(self._pb, error))
        return [None] * len(requests)

    def close(self) -> None:
        """Wait for the requests that are under way: the server unloads a model when they have been answered."""
        self._threads.shutdown()

    def _start(self, sender: Any, request: Any) -> None:
        if not self._free.acquire(blocking=False):
            raise CapacityError(f"{MOST_UNARY_CALLS} requests are under way, no more may be; try later")
        try:
            self._threads.submit(self._answer, sender, read_call(request))
        except BaseException:
            self._free.release()
            raise

    def _answer(self, sender: Any, call: Call) -> None:
        try:
            response = self._ask(call)
        except Exception as error:
            response = error_response(self._pb, error)
        finally:
            self._free.release()
        self._send(sender, response)

    def _ask(self, call: Call) -> Any:
        """The one response: Triton Server 24.10 may lose a second one that comes close behind the first."""
        request = self._pb.InferenceRequest(
            model_name=ORCHESTRATOR,
            request_id=call.request_id,
            inputs=[self._pb.Tensor(name, array) for name, array in call.arrays.items()],
            parameters=dict(call.parameters),
            requested_output_names=list(call.outputs),
        )
        try:
            responses = request.exec(decoupled=True)
            del request
            call.arrays.clear()
            (response,) = responses
        except self._pb.TritonModelException as error:
            raise _refused(str(error)) from None
        if response.has_error():
            return self._pb.InferenceResponse(output_tensors=[], error=self._own_error(response.error().message()))
        return self._pb.InferenceResponse(output_tensors=response.output_tensors())

    def _own_error(self, message: str) -> Any:
        """The error of the call, with the code that its message begins with: 24.10 makes INTERNAL of all of them."""
        code, _, text = message.partition(": ")
        if code in CODES:
            return coded_error(self._pb, code, text)
        return triton_error(self._pb, _refused(message))

    def _send(self, sender: Any, response: Any) -> None:
        try:
            sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except self._pb.TritonModelException as error:
            logger.warning("a response could not be sent: %s", error)


def _refused(message: str) -> KimiError:
    """The server's own error of a call: the other model is away, or something that nobody foresaw."""
    if _NOT_READY in message:
        return ModelUnavailableError(f"{ORCHESTRATOR} is not ready")
    return KimiError(message)
