"""Two BLS calls a round, as bare as they can be."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


def call(model_name, inputs, outputs):
    request = pb_utils.InferenceRequest(model_name=model_name, requested_output_names=outputs, inputs=inputs)
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return {tensor.name(): tensor for tensor in response.output_tensors()}


class TritonPythonModel:
    def execute(self, requests):
        return [self.run(request) for request in requests]

    def run(self, request):
        target_plan, draft_plan, rounds = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().copy()
            for name in ("TARGET_PLAN", "DRAFT_PLAN", "ROUNDS")
        )
        seconds = np.zeros(int(rounds[0]))
        for i in range(len(seconds)):
            start = time.perf_counter()
            verified = call("kimi_target", [pb_utils.Tensor("PLAN", target_plan)], ["REPLY", "AUX_HIDDEN_STATES"])
            inputs = [pb_utils.Tensor("PLAN", draft_plan), verified["AUX_HIDDEN_STATES"]]
            call("eagle3_draft", inputs, ["REPLY"])
            seconds[i] = time.perf_counter() - start
        return pb_utils.InferenceResponse([pb_utils.Tensor("SECONDS", seconds)])
