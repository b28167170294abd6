"""Every URL of the endpoint, once: the application, /openapi.json and docs/openai.md are made from this table."""

from dataclasses import dataclass

from pydantic import BaseModel

from kimi_openai.request_fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One URL and method."""

    method: str
    path: str
    handler: str
    """Name of the method of `Endpoint` that answers."""
    does: str
    body: type[BaseModel] | None = None
    needs_key: bool = True
    """Only answered to callers with the key, where one is set."""
    may_stream: bool = False


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/chat/completions",
        "chat",
        "a chat; the server renders the checkpoint's template",
        ChatRequest,
        may_stream=True,
    ),
    ApiRoute(
        "POST",
        "/v1/completions",
        "complete",
        "continues texts, or lists of token ids",
        CompletionRequest,
        may_stream=True,
    ),
    ApiRoute("POST", "/tokenize", "tokenize", "the token ids of a text or a chat, as vLLM answers", TokenizeRequest),
    ApiRoute("POST", "/detokenize", "detokenize", "the text of token ids, likewise", DetokenizeRequest),
    ApiRoute("GET", "/v1/models", "list_models", "the served names: `--model-name`, `kimi` by default"),
    ApiRoute("GET", "/v1/models/{name}", "show_model", "one of them"),
    ApiRoute(
        "GET", "/health", "health", "200 while the server and its model answer, else 503; needs no key", needs_key=False
    ),
    ApiRoute(
        "GET", "/openapi.json", "openapi", "this table with every field, as OpenAPI 3.1; needs no key", needs_key=False
    ),
)
