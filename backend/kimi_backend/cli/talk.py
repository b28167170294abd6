"""`kimi generate`: one prompt against a running server, and what `kimi chat` shares with it."""

import collections
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from kimi_backend.cli.read_beside import read_beside
from kimi_backend.errors import KimiError
from kimi_client import Chunk, Completion, KimiClient, KimiClientError, Stream

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_notes = Console(stderr=True, highlight=False)


def describe_completion(completion: Completion) -> str:
    """One line about how it went: tokens, speed, acceptance, why it ended."""
    statistics = completion.statistics
    total_s = statistics.get("total_time_s") or 0.0
    parts = [f"{completion.num_output_tokens} tokens"]
    if total_s:
        parts.append(f"{completion.num_output_tokens / total_s:.1f} tokens/s")
    speculation = completion.speculation
    if speculation:
        parts.append(f"acceptance length {speculation['mean_acceptance_length']:.2f}")
    parts += [f"finish: {completion.finish_reason}", f"seed {statistics.get('seed')}"]
    parts += statistics.get("pretences", [])
    return ", ".join(parts)


def take_ctrl_c() -> None:
    """Let Ctrl-C interrupt, also where this process was started with the signal ignored, as background jobs are."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_reply(start: Callable[[], Stream]) -> Completion | None:
    """Write text as it arrives; Ctrl-C cancels the request and returns None."""
    try:
        with read_beside(start) as reply:
            for chunk in reply:
                _write(chunk)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        _notes.print("[yellow]cancelled[/yellow]")
        return None
    sys.stdout.write("\n")
    return reply.completion


def _write(chunk: Chunk) -> None:
    sys.stdout.write(printable(chunk.text) if sys.stdout.isatty() else chunk.text)
    sys.stdout.flush()


def printable(text: str) -> str:
    """The text without what would steer a terminal: a model may write anything."""
    return _STEERING.sub(lambda found: repr(found[0])[1:-1], text)


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn the client's errors into the command line's."""
    try:
        yield
    except KimiClientError as error:
        raise KimiError(str(error)) from error


@client_errors()
def generate(url: str, prompt: str, fields: dict[str, Any], as_json: bool) -> None:
    """Stream one completion to stdout, or print it as one JSON object."""
    take_ctrl_c()
    client = KimiClient(url)
    if as_json:
        with read_beside(lambda: client.stream(text_input=prompt, **fields)) as reply:
            collections.deque(reply, maxlen=0)
        completion = reply.completion
        print_json(
            {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "token_ids": list(completion.token_ids),
                "statistics": completion.statistics,
            }
        )
        return
    done = _print_reply(lambda: client.stream(text_input=prompt, **fields))
    if done is not None:
        _notes.print(f"[dim]{describe_completion(done)}[/dim]")


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
