"""The endpoint as an ASGI application. It holds no state but a gRPC connection."""

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kimi_client.aio import AsyncKimiClient
from kimi_client.replies import DeclaredTools, ReplyReader
from kimi_openai.api_keys import ApiKey, KeyRing
from kimi_openai.body_values import check_values
from kimi_openai.chat_page import show_chat_page
from kimi_openai.chat_replies import ChatWriter
from kimi_openai.connection import ClientLeft, read_body, while_connected
from kimi_openai.connection_limits import BodyBudget
from kimi_openai.errors import CLIENT_CLOSED_REQUEST, ApiError
from kimi_openai.event_stream import UsageMode
from kimi_openai.generation import REQUEST_ID_HEADER, Generation, MakeWriter
from kimi_openai.observing import KEY_NAME, EndpointMetrics, Observed
from kimi_openai.openapi import describe
from kimi_openai.own_names import OwnNames
from kimi_openai.replies import CompletionWriter, Envelope
from kimi_openai.request_fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
)
from kimi_openai.request_parsing import RequestT, parse_body, shown
from kimi_openai.routes import ROUTES, ApiRoute
from kimi_openai.server_fields import ServerRequest, chat_fields, completion_fields, declares_tools
from kimi_openai.settings import EndpointSettings
from kimi_openai.tokens import text_of, token_ids_of

if TYPE_CHECKING:
    from kimi_openai.tracing import RequestTracer

logger = logging.getLogger("kimi_openai")
HINTS = {404: "; /openapi.json lists what is there"}
Handler = Callable[[Request], Awaitable[Response]]


class Endpoint:
    """The handlers, and what they share."""

    def __init__(self, settings: EndpointSettings, tracer: "RequestTracer | None" = None) -> None:
        """tracer: makes spans of requests; None: nobody does."""
        self._settings = settings
        self._tracer = tracer
        self._started_at = int(time.time())
        self._bodies = BodyBudget(settings.limits.max_bytes_of_all_bodies)
        self._keys = KeyRing(settings.api_keys)
        self.metrics = EndpointMetrics()
        self._client: AsyncKimiClient

    def make_app(self) -> Starlette:
        """The application; it connects when its server starts it."""
        page = [Route("/", show_chat_page)] if self._settings.has_chat_page else []
        return Starlette(
            routes=[*page, *map(self._route, ROUTES)],
            lifespan=self._connected,
            middleware=self._middleware(),
            exception_handlers={
                ApiError: _answer_error,
                HTTPException: _answer_http_error,
                ClientLeft: _answer_nobody,
                ClientDisconnect: _answer_nobody,
                Exception: _answer_failure,
            },
        )

    def _route(self, route: ApiRoute) -> Route:
        handler: Handler = getattr(self, route.handler)
        path = route.path.replace("{name}", "{name:path}")
        if route.body is not None:
            handler = self._limited(handler)
        elif route.needs_key:
            handler = self._guarded(handler)
        return Route(path, handler, methods=[route.method])

    def _middleware(self) -> list[Middleware]:
        origins = self._settings.cors_origins
        own_names = Middleware(OwnNames, names=self._settings.names, origins=origins)
        always = [Middleware(Observed, metrics=self.metrics), own_names]
        if not origins:
            return always
        headers = ["Authorization", "Content-Type"]
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=headers,
            expose_headers=[REQUEST_ID_HEADER],
        )
        return [*always, cors]

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
            request.state.share = running.__enter__()
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

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(describe())

    async def tokenize(self, request: Request) -> Response:
        body = await self._parse(request, TokenizeRequest)
        self._served(body.model)
        return JSONResponse(await while_connected(request, token_ids_of(self._client, body)))

    async def detokenize(self, request: Request) -> Response:
        body = await self._parse(request, DetokenizeRequest)
        self._served(body.model)
        return JSONResponse(await while_connected(request, text_of(self._client, body)))

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
        body = await self._parse(request, ChatRequest)
        asked = chat_fields(body)
        tools = DeclaredTools(body.tools, body.messages) if declares_tools(body) else None

        def make_reader(begins_thinking: bool) -> ReplyReader:
            return ReplyReader(
                tools,
                begins_thinking=begins_thinking,
                splits_thinking=self._settings.splits_thinking,
                is_one_call_enough=body.parallel_tool_calls is False,
            )

        def make_writer() -> ChatWriter:
            return ChatWriter(
                make_reader,
                with_logprobs=bool(body.logprobs),
                with_token_ids=bool(body.return_token_ids),
                with_origins=bool(body.return_token_origins),
                num_prompt_logprobs=body.prompt_logprobs,
            )

        return await self._reply(request, body, [asked], make_writer, "chatcmpl-")

    async def complete(self, request: Request) -> Response:
        body = await self._parse(request, CompletionRequest)

        def make_writer() -> CompletionWriter:
            return CompletionWriter(
                num_logprobs=body.logprobs,
                with_token_ids=bool(body.return_token_ids),
                with_origins=bool(body.return_token_origins),
                echoes=bool(body.echo),
                num_prompt_logprobs=body.prompt_logprobs,
            )

        return await self._reply(request, body, completion_fields(body), make_writer, "cmpl-")

    async def _parse(self, request: Request, kind: type[RequestT]) -> RequestT:
        body = await read_body(request, self._settings.limits, self._bodies)
        await check_values(body)
        return parse_body(body, kind, refuses_unknown=self._settings.refuses_unknown_fields)

    async def _reply(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[ServerRequest],
        make_writer: MakeWriter,
        prefix: str,
    ) -> Response:
        model = self._served(body.model)
        request.state.share.grow(len(prompts) * (body.n or 1))
        with contextlib.ExitStack() as traced:
            span = None if self._tracer is None else traced.enter_context(self._tracer.request(*_named(request)))
            traced_fields = {} if span is None else {"metadata": span.metadata, **span.fields}
            generation = Generation(
                self._client, prompts, body.n or 1, is_streamed=bool(body.stream), more=traced_fields
            )
            if span is not None:  # before the span ends, which is when the reply has been sent
                traced.callback(lambda: setattr(span, "statistics", generation.statistics))
            envelope = Envelope(reply_id=prefix + generation.request_id, model=model)
            if body.stream:
                mode = _usage_mode(body.stream_options)
                reply = await generation.answer_streamed(request, make_writer, envelope, mode)
            else:
                reply = await generation.answer_whole(request, make_writer, envelope)
            return _EndsWith(reply, traced.pop_all()) if span is not None else reply


def _named(request: Request) -> tuple[str, Headers]:
    """The name of a request's span, and its headers."""
    return f"{request.method} {request.url.path}", request.headers


def _usage_mode(options: StreamOptions | None) -> UsageMode:
    if options is None or not (options.include_usage or options.continuous_usage_stats):
        return UsageMode.NONE
    return UsageMode.CONTINUOUS if options.continuous_usage_stats else UsageMode.AT_THE_END


class _EndsWith(Response):
    """A reply whose end, whichever it is, leaves a context."""

    def __init__(self, reply: Response, context: AbstractContextManager[Any]) -> None:
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
