"""`kimi health`: whether a server can really generate, not only whether its ports answer.

Triton Server 24.10 calls a model ready whose process was killed, and a lost draft fails no request. So besides asking
each model, this runs a tiny request and looks at whether the draft took part in it. It talks plain HTTP and imports
nothing heavy: a container runs it every few seconds.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kimi_backend.config.settings import ServingSettings

EXIT_UNHEALTHY = 1
QUEUE_IS_FULL = "requests are waiting"
"""A part of the message of a server that refuses for want of room: busy is not ill."""
_PROBE = {
    "text_input": "1",
    "max_tokens": 4,
    "ignore_eos": True,
    "temperature": 0.0,
    "seed": 0,
    "priority": 1_000_000,
    "cache_salt": "kimi health",
}
"""Prefill gives the first token; the second step verifies draft tokens if there is a draft."""


@dataclass(frozen=True, slots=True)
class Health:
    """The findings; `problem` is None when all is well."""

    problem: str | None
    is_busy: bool = False
    """The queue was full, so nothing could be generated."""
    speculates: bool = False
    warning: str | None = None
    """The reason why it is slower than it could be."""


Post = Callable[[str, dict[str, Any] | None], tuple[int, str]]
"""(path, JSON body or None for GET) -> (HTTP status, reply body). Raises OSError where nothing answers."""


def http_post(url: str, timeout_s: float) -> Post:
    """Requests to a server at `url` (host:port)."""

    def send(path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{url}/v2/{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    return send


def check_health(post: Post, *, with_draft: bool) -> Health:
    """Ask the server, then its models, then for a few tokens.

    Args:
        with_draft: whether a draft should be there.
    """
    models = ["kimi_target", *(["eagle3_draft"] if with_draft else []), "spec_ensemble"]
    for path in ("health/live", "health/ready", *(f"models/{name}/ready" for name in models)):
        try:
            status, _ = post(path, None)
        except OSError as error:
            return Health(f"{path}: no answer ({error})")
        if status != 200:
            return Health(f"{path}: HTTP {status}, 200 was expected")
    return _generate(post, with_draft)


def _generate(post: Post, with_draft: bool) -> Health:
    probe = _PROBE | ({"num_speculative_tokens": 1} if with_draft else {})
    try:
        status, body = post("models/spec_ensemble/generate", probe)
    except OSError as error:
        return Health(f"generate: no answer ({error})")
    if status != 200:
        if QUEUE_IS_FULL in body:
            return Health(None, is_busy=True)
        return Health(f"generate: HTTP {status}: {_message(body)}")
    reply = json.loads(body)
    if reply["num_output_tokens"] != _PROBE["max_tokens"]:
        return Health(f"generate: {reply['num_output_tokens']} tokens came, {_PROBE['max_tokens']} were asked for")
    statistics = json.loads(reply["statistics"])
    speculates = statistics["is_draft_there"]  # whether it was used is the speculation policy's choice
    if with_draft and not speculates:
        return Health("generate: it answered without the draft; eagle3_draft is lost or still loading")
    return Health(None, speculates=speculates, warning=statistics.get("acceptance_problem"))


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200]


def expects_draft(settings: ServingSettings) -> bool:
    """A server started with this environment has a draft, unless a checkpoint is named and no draft, or k is 0."""
    if settings.max_speculative_tokens == 0:
        return False
    return settings.chosen_proposer.uses_draft or not settings.checkpoint


def health_command(
    url: Annotated[str, typer.Option(help="host:port of the server's HTTP endpoint.")] = "localhost:8000",
    draft: Annotated[
        bool | None,
        typer.Option("--draft/--no-draft", help="Whether there should be one; default: as KIMI_DRAFT says."),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for each answer.", min=0.1)] = 15.0,
) -> None:
    """Check that every model is ready and that a few tokens come, with the draft taking part. Exit code 1 if not."""
    with_draft = expects_draft(ServingSettings.from_parameters({}, os.environ)) if draft is None else draft
    health = check_health(http_post(url, timeout_s), with_draft=with_draft)
    if health.problem is not None:
        typer.echo(f"unhealthy: {health.problem}", err=True)
        raise typer.Exit(EXIT_UNHEALTHY)
    if health.is_busy:
        typer.echo("healthy: ready, its queue is full")
    else:
        typer.echo("healthy: it generates" + (", with speculation" if health.speculates else ""))
    if health.warning is not None:
        typer.echo(f"warning: {health.warning}", err=True)
