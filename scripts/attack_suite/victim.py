"""The server that is attacked, and plain requests to it: what a stranger on the network can send."""

import dataclasses
import http.client
import json
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from kimi_backend.hosting.embedded_server import EmbeddedServer
from kimi_backend.serving.descriptions import description_from_json
from kimi_backend.text.tokenizer import Tokenizer, load_tokenizer
from kimi_backend.types.plan import RunnerDescription

RUNNERS = ("kimi_target", "eagle3_draft")
SECRET_BYTES = 32
_TIMEOUT_S = 30.0


class Broken(Exception):
    """The server let something through."""


@dataclasses.dataclass(frozen=True, slots=True)
class Victim:
    http_port: int
    grpc_port: int
    runner_secret: bytes
    """The secret, for the attacks of a caller that the runners know, and to look for it where it must not be."""
    admin_secret: str
    tokenizer: Tokenizer
    """That of the checkpoint which is served."""
    trace_file: Path
    """The file into which the server was told to write traces."""

    @classmethod
    def of(cls, server: EmbeddedServer, checkpoint: Path, trace_file: Path = Path("/dev/null")) -> "Victim":
        """A running server of this machine."""
        assert server.runner_secret_file is not None
        return cls(
            http_port=server.ports.http,
            grpc_port=server.ports.grpc,
            runner_secret=server.runner_secret_file.read_bytes(),
            admin_secret=server.admin_secret,
            tokenizer=load_tokenizer(str(checkpoint)),
            trace_file=trace_file,
        )

    def send(
        self, method: str, path: str, body: bytes | str = b"", headers: dict[str, str] | None = None
    ) -> "tuple[int, bytes]":
        """(status, body) of one HTTP request, sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def post(self, path: str, fields: Any, headers: dict[str, str] | None = None) -> "tuple[int, bytes]":
        """A JSON body below /v2/."""
        return self.send("POST", f"/v2/{path}", json.dumps(fields), headers)

    def generate(self, **fields: Any) -> "tuple[int, dict[str, Any]]":
        """(status, reply) of a completion."""
        status, body = self.post("models/spec_ensemble/generate", fields)
        return status, json.loads(body)

    def grpc(self) -> grpcclient.InferenceServerClient:
        """A client of its own; close it."""
        return grpcclient.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")

    def call_runner(self, model: str, *inputs: grpcclient.InferInput, with_secret: bool = False) -> str:
        """The status code of one request to a runner, "OK" if it was answered."""
        given = list(inputs)
        if with_secret:
            given.insert(0, tensor("SECRET", np.frombuffer(self.runner_secret, np.uint8), "UINT8"))
        client = self.grpc()
        try:
            client.infer(model, given, client_timeout=_TIMEOUT_S)
            return "OK"
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"
        finally:
            client.close()

    def describe_draft(self) -> RunnerDescription:
        """Its description, as its orchestrator gets it."""
        client = self.grpc()
        try:
            secret = tensor("SECRET", np.frombuffer(self.runner_secret, np.uint8), "UINT8")
            reply = client.infer("eagle3_draft", [secret, tensor("DESCRIBE", np.ones(1, np.bool_), "BOOL")])
            return description_from_json(reply.as_numpy("DESCRIPTION")[0])
        finally:
            client.close()


def tensor(name: str, array: "np.ndarray[Any, Any]", datatype: str) -> grpcclient.InferInput:
    """An input of a request."""
    made = grpcclient.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made
