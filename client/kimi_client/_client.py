"""The blocking client."""

import queue
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from kimi_client._errors import KimiClientError, RequestCancelled, RequestTimedOut, ServerUnreachable, from_server
from kimi_client._tensors import MODEL_NAME, build_inputs, is_final, parse_chunk
from kimi_client._types import Chunk, Completion, join_chunks

# Without it the server reports stream errors as bare text, without a status.
STATUS_HEADER = {"triton_grpc_error": "true"}
_CAUSE_WAIT_S = 1.0


class Stream:
    """One running request: iterate over its chunks; leave the `with` block or call `cancel` to stop it early."""

    def __init__(self, client: grpcclient.InferenceServerClient, timeout_s: float | None) -> None:
        self.request_id = uuid.uuid4().hex
        self.chunks: list[Chunk] = []
        self._client = client
        self._timeout_s = timeout_s
        self._arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._is_open = True

    def _start(self, fields: dict[str, Any]) -> None:
        inputs = build_inputs(fields)
        # The stream's own deadline also covers a server that never answers.
        self._client.start_stream(
            lambda result, error: self._arrived.put((result, error)),
            stream_timeout=self._timeout_s,
            headers=STATUS_HEADER,
        )
        self._client.async_stream_infer(MODEL_NAME, inputs, request_id=self.request_id)

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they arrive.

        Raises:
            KimiClientError: one of its subclasses; the request has ended then.
        """
        while self._is_open:
            result, error = self._arrived.get()
            if error is not None:
                self._close(cancel=False)
                raise from_server(error)
            chunk = parse_chunk(result)
            self.chunks.append(chunk)
            if is_final(result):
                self._close(cancel=False)
            yield chunk

    def result(self) -> Completion:
        """Wait for the end and join all chunks. Raises as iterating does."""
        for _ in self:
            pass
        if not self.chunks or self.chunks[-1].finish_reason is None:
            raise RequestCancelled("the stream was cancelled before the request ended")
        return join_chunks(self.chunks)

    def _why_it_failed(self, error: InferenceServerException) -> KimiClientError:
        """The stream's own error, which says more than that of the call that found it broken."""
        try:
            _, cause = self._arrived.get(timeout=_CAUSE_WAIT_S)
        except queue.Empty:
            cause = None
        self._close(cancel=True)
        return ServerUnreachable(error.message()) if cause is None else from_server(cause)

    def cancel(self) -> None:
        """Stop the request on the server; does nothing when it has ended."""
        self._close(cancel=True)

    def _close(self, cancel: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._client.stop_stream(cancel_requests=cancel)
            self._client.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class KimiClient:
    """Talks to a server's `spec_ensemble` over gRPC. Threads may share one: every request has its own stream.

    Example:
        >>> client = KimiClient("localhost:8001")
        >>> client.generate(text_input="def add(a, b):", max_tokens=32).text
    """

    def __init__(self, url: str = "localhost:8001", *, timeout_s: float | None = None) -> None:
        """
        Args:
            url: host:port of the server's gRPC endpoint.
            timeout_s: longest that a request may take, unless it says otherwise.
        """
        self.url = url
        self.timeout_s = timeout_s

    def is_ready(self) -> bool:
        """Whether the server and the model answer. False when nothing is there."""
        try:
            with grpcclient.InferenceServerClient(self.url) as client:
                return bool(client.is_server_ready() and client.is_model_ready(MODEL_NAME))
        except InferenceServerException:
            return False

    def stream(self, *, timeout_s: float | None = None, **fields: Any) -> Stream:
        """Start a request and return its stream.

        Args:
            timeout_s: seconds until the request is cancelled.
            fields: exactly one of text_input, messages, input_ids; and any other input of docs/protocol.md.

        Raises:
            InvalidRequest: a field is unknown or has a value that its type cannot hold.
            ServerUnreachable: nothing answers.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        stream = Stream(grpcclient.InferenceServerClient(self.url), None if limit is None else limit + 5)
        try:
            stream._start({"stream": True, "timeout_s": limit, **fields})
        except InferenceServerException as error:
            raise stream._why_it_failed(error) from error
        return stream

    def generate(self, *, timeout_s: float | None = None, **fields: Any) -> Completion:
        """Run a request to its end. Arguments and errors as for `stream`.

        Raises:
            RequestTimedOut: it was cancelled because its time was over.
        """
        completion = self.stream(timeout_s=timeout_s, **fields).result()
        limit = self.timeout_s if timeout_s is None else timeout_s
        if completion.finish_reason == "cancelled" and limit is not None:
            raise RequestTimedOut(f"cancelled after {limit:g} s with {completion.num_output_tokens} tokens")
        return completion


__all__ = ["KimiClient", "KimiClientError", "Stream"]
