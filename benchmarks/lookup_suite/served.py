"""Requests through the real Triton Server."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.types.request import SpeculationStats
from kimi_client import Completion
from kimi_client.load import run_load
from lookup_suite.cells import Reply, Send
from serving_suite.side_by_side import servers_side_by_side


@contextmanager
def served(settings: ServingSettings) -> Iterator[Send]:
    """A way to send requests to a server that the settings make."""
    with servers_side_by_side({"all": settings}) as servers:
        yield partial(_send, f"localhost:{servers['all'].ports.grpc}")


def _send(url: str, requests: Sequence[dict[str, Any]], streams: int) -> tuple[list[Reply], float]:
    result = asyncio.run(run_load(url, [{**each, "return_token_ids": True} for each in requests], streams))
    if result.errors:
        raise SystemExit(result.errors[0])
    by_seed = {r.completion.statistics["seed"]: reply_of(r.completion) for r in result.requests}
    return [by_seed[each["seed"]] for each in requests], result.output_tokens_per_second


def reply_of(completion: Completion) -> Reply:
    """The part of a completion that the table needs."""
    statistics, rounds = completion.statistics, completion.speculation
    return Reply(
        token_ids=completion.token_ids,
        rounds=None if rounds is None else _rounds(rounds),
        by_proposer={name: _rounds(values) for name, values in statistics["speculation_by_proposer"].items()},
        num_verifies=sum(statistics["num_draft_tokens_histogram"]),
    )


def _rounds(values: dict[str, Any]) -> SpeculationStats:
    return SpeculationStats(**{field.name: values[field.name] for field in fields(SpeculationStats)})
