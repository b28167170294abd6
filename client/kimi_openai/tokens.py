"""/tokenize and /detokenize: a request for no token, whose prompt the server tokenises or shows."""

from typing import Any

from kimi_client import KimiClientError
from kimi_client.aio import AsyncKimiClient
from kimi_openai.errors import bad_field, from_client_error
from kimi_openai.request_fields import DetokenizeRequest, TokenizeRequest


async def token_ids_of(client: AsyncKimiClient, body: TokenizeRequest) -> dict[str, Any]:
    """vLLM's answer to /tokenize.

    Raises:
        ApiError: neither a text nor a chat, or both, or the server refused it.
    """
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "prompt or messages is needed, one of them")
    if body.messages is None and (name := "tools" if body.tools is not None else None):
        raise bad_field(name, "goes with messages only")
    if body.messages is None and body.chat_template_kwargs is not None:
        raise bad_field("chat_template_kwargs", "goes with messages only")
    asked: dict[str, Any] = {"text_input": body.prompt, "messages": body.messages, "tools": body.tools}
    asked |= {"chat_template_kwargs": body.chat_template_kwargs, "return_token_ids": True}
    name = "prompt" if body.messages is None else "messages"
    _, token_ids = await _ask(client, asked, {"text_input": name, "prompt": name})
    return {"count": len(token_ids), "tokens": token_ids}


async def text_of(client: AsyncKimiClient, body: DetokenizeRequest) -> dict[str, Any]:
    """vLLM's answer to /detokenize.

    Raises:
        ApiError: the server refused it.
    """
    names = {"input_ids": "tokens", "prompt": "tokens"}
    text, _ = await _ask(client, {"input_ids": body.tokens, "echo": True}, names)
    return {"prompt": text}


async def _ask(client: AsyncKimiClient, fields: dict[str, Any], names: dict[str, str]) -> tuple[str, list[int]]:
    try:
        completion = await client.generate(max_tokens=0, stream=False, **fields)
    except KimiClientError as error:
        raise from_client_error(error, names) from None
    return completion.text, list(completion.prompt_token_ids)
