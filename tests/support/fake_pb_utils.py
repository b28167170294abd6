"""The part of Triton Server's Python utilities that `serving` uses, in this process."""

import numpy as np

from support.waiting import PATIENCE_S


class TritonModelException(Exception):
    pass


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message, code=INTERNAL):
        self._message, self._code = message, code

    def message(self):
        return self._message

    def code(self):
        return self._code


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, np.asarray(array)

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array

    def is_cpu(self):
        return True


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self):
        return self._tensors

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


def get_input_tensor_by_name(request, name):
    return next((t for t in request.inputs() if t.name() == name), None)


class RecordingSender:
    """A response sender that keeps what it was given; `gate` holds sends up until it is set. `num_begun` counts
    them."""

    def __init__(self, gate=None, fails=False):
        self.sent = []
        self.cancelled = False
        self.num_begun = 0
        self._gate, self._fails = gate, fails

    def send(self, response, flags=0):
        self.num_begun += 1
        if self._gate is not None:
            self._gate.wait(PATIENCE_S)
        if self._fails:
            raise TritonModelException("the client is gone")
        self.sent.append((response, flags))

    def is_cancelled(self):
        return self.cancelled

    def outputs(self, name):
        found = []
        for response, _ in self.sent:
            tensors = {t.name(): t.as_numpy().reshape(-1) for t in response.output_tensors()}
            if name in tensors and tensors[name].size:
                found.append(tensors[name][0])
        return found

    @property
    def finals(self):
        return [flags for _, flags in self.sent].count(TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Request:
    def __init__(self, tensors):
        self._tensors = [Tensor(name, array) for name, array in tensors.items()]

    def inputs(self):
        return self._tensors
