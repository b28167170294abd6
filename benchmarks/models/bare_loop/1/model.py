"""BLS calls as bare as they can be: two a round, or one of a model that only answers."""

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
        tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
        seconds = np.zeros(int(tensors["ROUNDS"][0]))
        for i in range(len(seconds)):
            start = time.perf_counter()
            self.round(tensors["TARGET_PLAN"], tensors.get("DRAFT_PLAN"), bool(tensors["TAKES_TENSOR"][0]))
            seconds[i] = time.perf_counter() - start
        return pb_utils.InferenceResponse([pb_utils.Tensor("SECONDS", seconds)])

    def round(self, target_plan, draft_plan, takes_tensor):
        plan = [pb_utils.Tensor("PLAN", target_plan)]
        if draft_plan is None:
            call("bare_callee", plan, ["REPLY"])
            return
        verified = call("kimi_target", plan, ["REPLY", "AUX_HIDDEN_STATES"] if takes_tensor else ["REPLY"])
        inputs = [pb_utils.Tensor("PLAN", draft_plan)]
        if takes_tensor:
            inputs.append(verified["AUX_HIDDEN_STATES"])
        call("eagle3_draft", inputs, ["REPLY"])
