"""Calls that the processes beside a server make to it, with the admin secret: over HTTP, but for loading.

24.10 loads a model on one of the threads that serve HTTP. The streams of that thread stand still meanwhile, and where
more responses come than its pipe holds, as many of each stream's last ones are never sent. gRPC has a thread for it.
"""

import time
import urllib.error
import urllib.request

from kimi_backend.hosting.admin_access import admin_headers, admin_metadata

_ANSWER_S = 5.0
_LOAD_S = 3600.0
_POLL_S = 0.25
_LOAD_CALL = "/inference.GRPCInferenceService/RepositoryModelLoad"
_MODEL_NAME_FIELD = b"\x12"
"""The tag of the call's message: field 2, a text of one byte's length."""


class ServerApi:
    """One server's readiness and model control."""

    def __init__(self, address: str, secret: str, grpc_address: str = "") -> None:
        """
        Args:
            address: host:port of its HTTP endpoint.
            grpc_address: of its gRPC endpoint; for `reload` only.
        """
        self._base = f"http://{address}/v2"
        self._grpc_address = grpc_address
        self._secret = secret

    def is_ready(self, model: str) -> bool | None:
        """None: the server does not answer."""
        try:
            urllib.request.urlopen(f"{self._base}/models/{model}/ready", timeout=_ANSWER_S).close()
        except urllib.error.HTTPError:
            return False
        except OSError:
            return None
        return True

    def unload(self, model: str) -> None:
        """Make it unready at once; requests that it has taken go on, and it is gone after the last of them.

        Raises:
            OSError: the server refused or does not answer.
        """
        self._control(model, "unload", _ANSWER_S)

    def reload(self, model: str) -> None:
        """Unload, wait until it is gone, load.

        Raises:
            OSError: the server refused or does not answer.
        """
        self._control(model, "unload", _LOAD_S)
        deadline = time.monotonic() + _LOAD_S
        while self.is_ready(model) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._load(model)

    def _load(self, model: str) -> None:
        import grpc  # a process that loads nothing needs none of its 30 MB

        name = model.encode()
        try:
            with grpc.insecure_channel(self._grpc_address) as channel:
                load = channel.unary_unary(_LOAD_CALL)
                message = _MODEL_NAME_FIELD + bytes([len(name)]) + name
                load(message, metadata=admin_metadata(self._secret), timeout=_LOAD_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise OSError(error.details()) from None
            self._control(model, "load", _LOAD_S)  # gRPC takes TLS alone, or is turned off

    def _control(self, model: str, action: str, timeout_s: float) -> None:
        url = f"{self._base}/repository/models/{model}/{action}"
        request = urllib.request.Request(url, data=b"{}", method="POST", headers=admin_headers(self._secret))
        urllib.request.urlopen(request, timeout=timeout_s).close()
