"""A model runner behind Triton Server: a request describes the runner, times its steps, opens memory of the other one,
or is a step."""

import dataclasses
import logging
import os
import time
from typing import Any

import numpy as np
import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import InvalidRequestError
from kimi_backend.processes import keep_large_memory
from kimi_backend.runners.step_runner import StepRunner
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.descriptions import description_to_json, model_parameters
from kimi_backend.serving.runner_secret import Doorkeeper, read_secret
from kimi_backend.serving.triton_errors import error_response, forward_logs
from kimi_backend.types.plan import RunnerDescription
from kimi_backend.types.step_costs import StepCosts

logger = logging.getLogger("kimi_backend.serving")


def us_since(start: float) -> int:
    """Microseconds since a time of `perf_counter`."""
    return round(1e6 * (time.perf_counter() - start))


def read_settings(args: dict[str, str]) -> tuple[ServingSettings, Any, bytes]:
    """The settings that a model was loaded with, the server's Python utilities, to which logs go from now on, and the
    secret that its calls carry. From now on the process keeps the memory of its tensors."""
    import triton_python_backend_utils as pb_utils

    keep_large_memory()
    settings = ServingSettings.from_parameters(model_parameters(args), os.environ)
    forward_logs(pb_utils, settings.log_level)
    return settings, pb_utils, read_secret(os.environ)


class RunnerServer:
    """The common part of `kimi_target`'s and `eagle3_draft`'s servers."""

    opens: str
    """The input by which the other runner's memory is offered."""

    def __init__(self, runner: StepRunner, pb_utils: Any, description: RunnerDescription, secret: bytes) -> None:
        self._runner, self._pb = runner, pb_utils
        self._door = Doorkeeper(pb_utils, secret)
        self._description = dataclasses.replace(description, process_id=os.getpid())

    def run(self, requests: list[Any]) -> list[Any]:
        """One response for each request, in order; a bad one fails alone."""
        responses = []
        for request in requests:
            try:
                responses.append(self._respond(request))
            except Exception as error:  # the server needs a response for every request, whatever happened
                responses.append(error_response(self._pb, error))
        return responses

    def close(self) -> None:
        """Give up the runner's child processes and device memory."""
        self._runner.close()

    def _respond(self, request: Any) -> Any:
        self._door.check(request)
        if self._input(request, names.DESCRIBE) is not None:
            return self._response({names.DESCRIPTION: description_to_json(self._description)})
        if self._input(request, names.TIME_STEPS) is not None:
            costs = self._measure_costs().to_json()
            return self._response({names.STEP_COSTS: np.array([costs], dtype=np.object_)})
        handle = self._input(request, self.opens)
        if handle is not None:
            opened = self._open(handle.as_numpy().tobytes())
            return self._response({names.DESCRIPTION: description_to_json(opened)})
        return self._step(request)

    def _measure_costs(self) -> StepCosts:
        return self._runner.measure_costs()

    def _open(self, handle: bytes) -> RunnerDescription:
        """Open the other runner's memory. The description says what is open."""
        raise NotImplementedError

    def _step(self, request: Any) -> Any:
        raise NotImplementedError

    def _input(self, request: Any, name: str) -> Any | None:
        return self._pb.get_input_tensor_by_name(request, name)

    def _packed(self, request: Any, name: str) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        tensor = self._input(request, name)
        return None if tensor is None else np.ascontiguousarray(tensor.as_numpy())

    def _missing(self, *needed: str) -> InvalidRequestError:
        return InvalidRequestError(f"one of the inputs {', '.join(needed)} is needed, none was given")

    def _response(self, outputs: dict[str, Any]) -> Any:
        tensors = []
        for name, value in outputs.items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                tensors.append(self._pb.Tensor.from_dlpack(name, value))
            else:
                tensors.append(self._pb.Tensor(name, value.numpy() if isinstance(value, torch.Tensor) else value))
        return self._pb.InferenceResponse(output_tensors=tensors)
