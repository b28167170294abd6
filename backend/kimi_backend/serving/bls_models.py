"""The two model Protocols over Triton Server's in-process calls (BLS): one call a step, from one thread.

The two share an `AuxTransfer`, which says whether the target's aux hidden states need to travel.
"""

import dataclasses
from typing import Any

import numpy as np

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.serving import tensor_names as names
from kimi_backend.serving.aux_transfer import AuxTransfer
from kimi_backend.serving.descriptions import description_from_json
from kimi_backend.types import codec
from kimi_backend.types.plan import AuxHandle, DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply


class _BlsModel:
    def __init__(self, pb_utils: Any, model_name: str, aux_transfer: AuxTransfer) -> None:
        self._pb = pb_utils
        self._model_name = model_name
        self._aux_transfer = aux_transfer

    def _describe(self, *inputs: Any) -> RunnerDescription:
        request = self._pb.Tensor(names.DESCRIBE, np.ones(1, dtype=np.bool_))
        (text,) = self._call([request, *inputs], [names.DESCRIPTION])
        return description_from_json(text.as_numpy()[0])

    def _call(self, inputs: list[Any], outputs: list[str]) -> list[Any]:
        """Run one request on the model and return the named outputs, in order.

        Raises:
            ModelUnavailableError: any failure. The engine cannot mend a runner; it can only do without it.
        """
        request = self._pb.InferenceRequest(model_name=self._model_name, requested_output_names=outputs, inputs=inputs)
        try:
            response = request.exec()
        except self._pb.TritonModelException as error:
            raise ModelUnavailableError(f"runner {self._model_name}: {error}") from error
        if response.has_error():
            raise ModelUnavailableError(f"runner {self._model_name}: {response.error().message()}")
        by_name = {tensor.name(): tensor for tensor in response.output_tensors()}
        missing = [name for name in outputs if name not in by_name]
        if missing:
            raise ModelUnavailableError(f"runner {self._model_name}: reply lacks output {missing[0]}")
        return [by_name[name] for name in outputs]


class BlsTarget(_BlsModel):
    """`TargetModel` over `kimi_target`."""

    def describe(self) -> RunnerDescription:
        """See `TargetModel.describe`."""
        description = self._describe()
        self._aux_transfer.offer(description.aux_buffer)
        return description

    def verify(self, plan: TargetPlan) -> TargetReply:
        """See `TargetModel.verify`."""
        request = self._pb.Tensor(names.PLAN, codec.encode(plan))
        aux = None
        if self._aux_transfer.is_open:
            (reply,) = self._call([request], [names.REPLY])
        else:
            reply, aux = self._call([request], [names.REPLY, names.AUX_HIDDEN_STATES])
        # The buffer lies in shared memory that goes with the tensor: copy it, a few hundred bytes.
        decoded = codec.decode(TargetReply, reply.as_numpy().copy(), aux=AuxHandle())
        return dataclasses.replace(decoded, aux=AuxHandle(tensor=aux, region=decoded.aux.region))


class BlsDraft(_BlsModel):
    """`DraftModel` over `eagle3_draft`."""

    def describe(self) -> RunnerDescription:
        """See `DraftModel.describe`. The draft opens the buffer that the target offers."""
        offered = self._aux_transfer.offered
        inputs = [] if offered is None else [self._pb.Tensor(names.AUX_BUFFER, np.frombuffer(offered, np.uint8))]
        description = self._describe(*inputs)
        self._aux_transfer.answer(description.aux_buffer)
        return description

    def propose(self, plan: DraftPlan) -> DraftReply:
        """See `DraftModel.propose`. The target's aux tensor, if it came as one, is passed on untouched."""
        if self._aux_transfer.to_open is not None:  # a target that was restarted offers another buffer
            self.describe()
        inputs = [self._pb.Tensor(names.PLAN, codec.encode(plan))]
        if plan.aux.tensor is not None:
            inputs.append(plan.aux.tensor)
        (reply,) = self._call(inputs, [names.REPLY])
        return codec.decode(DraftReply, reply.as_numpy().copy())
