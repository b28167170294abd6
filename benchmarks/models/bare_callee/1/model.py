"""Gives back the first bytes of what it gets."""

import triton_python_backend_utils as pb_utils

REPLY_BYTES = 512


class TritonPythonModel:
    def execute(self, requests):
        return [self.run(request) for request in requests]

    def run(self, request):
        plan = pb_utils.get_input_tensor_by_name(request, "PLAN").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("REPLY", plan[:REPLY_BYTES].copy())])
