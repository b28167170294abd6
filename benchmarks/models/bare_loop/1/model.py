"""BLS calls as bare as they can be: two a round, or one of a model that only answers."""

import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils

from kimi_backend.serving.runner_secret import read_secret, secret_tensor
from kimi_backend.types import codec
from kimi_backend.types.plan import AuxHandle, DraftReply, TargetReply


def call(model_name, inputs, outputs):
    request = pb_utils.InferenceRequest(model_name=model_name, requested_output_names=outputs, inputs=inputs)
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return {tensor.name(): tensor for tensor in response.output_tensors()}


def runner_s(reply, kind, **beside):
    """Read what a runner says it took of its call."""
    return codec.decode(kind, reply.as_numpy().copy(), **beside).runner_us / 1e6


class TritonPythonModel:
    def initialize(self, args):
        self.secret = secret_tensor(pb_utils, read_secret(os.environ))

    def execute(self, requests):
        return [self.run(request) for request in requests]

    def run(self, request):
        tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
        seconds, in_runners = np.zeros((2, int(tensors["ROUNDS"][0])))
        for i in range(len(seconds)):
            start = time.perf_counter()
            replies = self.round(tensors["TARGET_PLAN"], tensors.get("DRAFT_PLAN"), bool(tensors["TAKES_TENSOR"][0]))
            seconds[i] = time.perf_counter() - start
            if replies:
                verified, proposed = replies
                in_runners[i] = runner_s(verified, TargetReply, aux=AuxHandle()) + runner_s(proposed, DraftReply)
        outputs = {"SECONDS": seconds, "RUNNER_SECONDS": in_runners}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    def round(self, target_plan, draft_plan, takes_tensor):
        """Both replies; nothing after a call of the model that only answers."""
        plan = [pb_utils.Tensor("PLAN", target_plan)]
        if draft_plan is None:
            call("bare_callee", plan, ["REPLY"])
            return ()
        verified = call(
            "kimi_target", [self.secret, *plan], ["REPLY", "AUX_HIDDEN_STATES"] if takes_tensor else ["REPLY"]
        )
        inputs = [self.secret, pb_utils.Tensor("PLAN", draft_plan)]
        if takes_tensor:
            inputs.append(verified["AUX_HIDDEN_STATES"])
        return verified["REPLY"], call("eagle3_draft", inputs, ["REPLY"])["REPLY"]
