"""The endpoint as an ASGI application. It holds no state but a gRPC connection."""

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kimi_client.aio import AsyncKimiClient
from kimi_client.replies import DeclaredTools, ReplyReader
from kimi_openai.api_keys import ApiKey, KeyRing
from kimi_openai.chat_page import show_chat_page
from kimi_openai.chat_replies import ChatWriter
from kimi_openai.connection import ClientLeft, read_body
from kimi_openai.connection_limits import BodyBudget
from kimi_openai.errors import CLIENT_CLOSED_REQUEST, ApiError
from kimi_openai.generation import Generation
from kimi_openai.observing import KEY_NAME, EndpointMetrics, Observed
from kimi_openai.own_names import OwnNames
from kimi_openai.replies import CompletionWriter, Envelope, ReplyWriter
from kimi_openai.request_fields import ChatRequest, CompletionRequest, GenerationRequest
from kimi_openai.request_parsing import parse_body, shown
from kimi_openai.server_fields import ServerRequest, chat_fields, completion_fields, declares_tools
from kimi_openai.settings import EndpointSettings

logger = logging.getLogger("kimi_openai")
HINTS = {404: "; /v1/chat/completions, /v1/completions, /v1/models and /health are there"}
Handler = Callable[[Request], Awaitable[Response]]


class Endpoint:
    """The handlers, and what they share."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._started_at = int(time.time())
        self._bodies = BodyBudget(settings.limits.max_bytes_of_all_bodies)
        self._keys = KeyRing(settings.api_keys)
        self.metrics = EndpointMetrics()
        self._client: AsyncKimiClient

    def make_app(self) -> Starlette:
        """The application; it connects when its server starts it."""
        page = [Route("/", show_chat_page)] if self._settings.has_chat_page else []
        return Starlette(
            routes=[
                *page,
                Route("/health", self.health),
                Route("/v1/models", self._guarded(self.list_models)),
                Route("/v1/models/{name:path}", self._guarded(self.show_model)),
                Route("/v1/chat/completions", self._limited(self.chat), methods=["POST"]),
                Route("/v1/completions", self._limited(self.complete), methods=["POST"]),
            ],
            lifespan=self._connected,
            middleware=[Middleware(Observed, metrics=self.metrics), Middleware(OwnNames, names=self._settings.names)],
            exception_handlers={
                ApiError: _answer_error,
                HTTPException: _answer_http_error,
                ClientLeft: _answer_nobody,
                ClientDisconnect: _answer_nobody,
                Exception: _answer_failure,
            },
        )

    @contextlib.asynccontextmanager
    async def _connected(self, app: Starlette) -> AsyncIterator[None]:
        async with AsyncKimiClient(self._settings.url) as self._client:
            yield

    def _guarded(self, handler: Handler) -> Handler:
        """The same, for callers that have the key."""

        async def guarded(request: Request) -> Response:
            self._owner(request)
            return await handler(request)

        return guarded

    def _limited(self, handler: Handler) -> Handler:
        """The same, held to the key's limits until the reply has been sent."""

        async def limited(request: Request) -> Response:
            running = self._keys.running(self._owner(request))
            running.__enter__()
            try:
                return _EndsWith(await handler(request), running)
            except BaseException:
                running.__exit__(None, None, None)
                raise

        return limited

    def _owner(self, request: Request) -> ApiKey | None:
        key = self._keys.owner(request.headers)
        if key is not None:
            request.scope[KEY_NAME] = key.name
        return key

    async def health(self, request: Request) -> Response:
        """200 while the server and its model answer, else 503. Needs no key."""
        is_ready = await self._client.is_ready()
        return JSONResponse({"status": "ready" if is_ready else "unavailable"}, 200 if is_ready else 503)

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._settings.model_names]})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._served(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started_at, "owned_by": "kimi"}

    def _served(self, name: str | None) -> str:
        """The name itself, or the first where none was given.

        Raises:
            ApiError: 404, nobody serves it.
        """
        names = self._settings.model_names
        if name is not None and name not in names:
            message = f"model: {shown(name)} given, {' or '.join(map(repr, names))} is served"
            raise ApiError(404, message, param="model", code="model_not_found")
        return names[0] if name is None else name

    async def chat(self, request: Request) -> Response:
        body = parse_body(await self._read_body(request), ChatRequest)
        asked = chat_fields(body)
        tools = DeclaredTools(body.tools, body.messages) if declares_tools(body) else None

        def make_reader(begins_thinking: bool) -> ReplyReader:
            return ReplyReader(
                tools,
                begins_thinking=begins_thinking,
                splits_thinking=self._settings.splits_thinking,
                is_one_call_enough=body.parallel_tool_calls is False,
            )

        writer = ChatWriter(
            make_reader,
            with_logprobs=bool(body.logprobs),
            with_token_ids=bool(body.return_token_ids),
            with_origins=bool(body.return_token_origins),
        )
        return await self._reply(request, body, asked, writer, "chatcmpl-")

    async def complete(self, request: Request) -> Response:
        body = parse_body(await self._read_body(request), CompletionRequest)
        writer = CompletionWriter(
            with_logprobs=body.logprobs is not None,
            with_token_ids=bool(body.return_token_ids),
            with_origins=bool(body.return_token_origins),
        )
        return await self._reply(request, body, completion_fields(body), writer, "cmpl-")

    async def _read_body(self, request: Request) -> bytes:
        return await read_body(request, self._settings.limits, self._bodies)

    async def _reply(
        self, request: Request, body: GenerationRequest, asked: ServerRequest, writer: ReplyWriter, prefix: str
    ) -> Response:
        model = self._served(body.model)
        generation = Generation(self._client, asked, is_streamed=bool(body.stream))
        envelope = Envelope(reply_id=prefix + generation.request_id, model=model)
        if not body.stream:
            return await generation.answer_whole(request, writer, envelope)
        includes_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await generation.answer_streamed(request, writer, envelope, includes_usage=includes_usage)


class _EndsWith(Response):
    """A reply whose end, whichever it is, leaves a context."""

    def __init__(self, reply: Response, context: AbstractContextManager[None]) -> None:
        self._reply, self._context = reply, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._context)
            await self._reply(scope, receive, send)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.status >= 500:
        logger.warning("%s: %d: %s", request.url.path, error.status, error)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}{HINTS.get(error.status_code, '')}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_failure(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "internal error").body(), 500)
