"""Steps without speculation through the real server, one call a round that brings the next step: the same texts.

The target runs on a CPU with the arrays of captured steps, as on a GPU; its "replays" are plain calls.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from kimi_backend.hosting.settings_to_server import find_model_repository
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_client import Completion, InvalidRequest, KimiClient
from kimi_client.load import run_load
from support.server_process import running_server, serving_settings

MODEL = """
import kimi_backend.runners.load.loading as loading
from kimi_backend.runners.graphs.recorder import EagerRecorder
from kimi_backend.serving.target_server import TargetServer

loading._recorder = lambda settings, placement: EagerRecorder()
launch = TargetServer._launch


def counted(self, plan):
    if (plan.num_given == 0).any():
        with open({log!r}, 'a') as log:
            log.write(f"{{plan.step_id}}\\n")
    return launch(self, plan)


TargetServer._launch = counted


class TritonPythonModel:
    def initialize(self, args):
        self.server = TargetServer.from_model_args(args)

    def execute(self, requests):
        return self.server.run(requests)

    def finalize(self):
        self.server.close()
"""
REPEATS = {"allowed_token_ids": [38, 383, 904]}
"""Texts of three tokens, in which a match is found for certain."""
REQUESTS = [
    {
        "text_input": "x" * (5 + 3 * index),
        "seed": index,
        "max_tokens": 20 + 4 * index,
        "temperature": float(index % 2),
        "num_speculative_tokens": 0,
        "return_token_ids": True,
    }
    for index in range(5)
]


def completions(url: str, **fields: Any) -> list[Completion]:
    """One for each request, in an order of their own."""
    result = asyncio.run(run_load(url, [{**request, **fields} for request in REQUESTS], len(REQUESTS)))
    assert not result.errors
    return sorted((r.completion for r in result.requests), key=lambda completion: completion.num_output_tokens)


def texts(url: str, **fields: Any) -> list[tuple[int, ...]]:
    """Token ids of each request."""
    return [tuple(completion.token_ids) for completion in completions(url, **fields)]


def test_the_same_texts_as_in_lockstep(checkpoint: Path, url: str, tmp_path: Path) -> None:
    """The common server runs in lockstep: its target has no captured steps."""
    expected, repeating = texts(url), texts(url, **REPEATS)
    repository, log = tmp_path / "models", tmp_path / "launched"
    shutil.copytree(find_model_repository(), repository)
    (repository / "kimi_target/1/model.py").write_text(MODEL.format(log=str(log)))
    settings = serving_settings(checkpoint, draft="", proposer="lookup", lookup_min_match=1, max_num_seqs=4)
    with running_server(settings, tmp_path, model_repository=repository) as server:
        own_url = f"localhost:{server.ports.grpc}"
        assert texts(own_url) == expected
        assert texts(own_url, num_speculative_tokens=4) == expected
        looked_up = completions(own_url, **REPEATS, num_speculative_tokens=4, return_token_origins=True)
        with KimiClient(own_url) as client, pytest.raises(InvalidRequest, match="proposer: eagle3 given"):
            client.generate(text_input="x", max_tokens=1, proposer="eagle3")
    assert [tuple(completion.token_ids) for completion in looked_up] == repeating
    check_looked_up(looked_up)
    assert all(expected)
    assert len(log.read_text().split()) > 15, "steps that were launched before the tokens of the step before were known"


def check_looked_up(completions: list[Completion]) -> None:
    """Speculation without a draft model: some guesses, and each that was kept has its origin."""
    rounds = [completion.statistics["speculation_by_proposer"] for completion in completions]
    assert {name for each in rounds for name in each} == {"lookup"}
    num_accepted = sum(each["lookup"]["num_accepted_draft_tokens"] for each in rounds if each)
    num_shown = sum(completion.token_origins.count(2) for completion in completions)
    assert num_accepted - 4 * len(completions) <= num_shown <= num_accepted
    assert not any(completion.statistics["is_draft_there"] for completion in completions)


def test_async_scheduling_is_the_engines_setting(checkpoint: Path) -> None:
    for given, is_on in (("false", False), ("true", True)):
        assert scheduler_settings(serving_settings(checkpoint, async_scheduling=given)).async_scheduling is is_on
