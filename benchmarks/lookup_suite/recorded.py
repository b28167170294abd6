"""Records what a draft proposes at each place of a pair's texts: no round accepts any of it, so none is skipped."""

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.spec_decode.protocols import Pending, Target
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.plan import TargetPlan, TargetReply
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS, GenerateRequest, SamplingParams, TokenDelta
from slice_suite.recording import Wrapped

STREAMS = 8


@dataclass(slots=True)
class RecordedText:
    """A prompt, what follows it, and the draft's proposals: whoever proposes, the text is the same."""

    prompt: list[int]
    span: list[int]
    """The part of the prompt that its right continuation repeats; empty where nothing has to be."""
    temperature: float
    tokens: list[int] = field(default_factory=list)
    proposals: dict[int, list[int]] = field(default_factory=dict)
    """Place among `tokens` -> what the draft proposes for it and those behind it."""

    def kept(self, place: int) -> int:
        """Count the draft's tokens for a place and those behind it that the target draws as well."""
        pairs = zip(self.proposals.get(place, []), self.tokens[place:], strict=False)
        return next((i for i, (guess, token) in enumerate(pairs) if guess != token), len(self.proposals.get(place, [])))


class RejectingTarget(Wrapped[Target]):
    """A target that notes draft tokens and sees others, which it never draws, in their place."""

    def __init__(self, target: Target, never_drawn: int, texts: Sequence[RecordedText]) -> None:
        super().__init__(target)
        self._never_drawn, self._texts = never_drawn, texts

    @property
    def depth(self) -> int:
        """0: the plan has all draft tokens."""
        return 0

    def launch(self, plan: TargetPlan) -> Pending[TargetReply]:
        rows = plan.rows
        tokens, ends = rows.token_ids.copy(), rows.query_lens.cumsum()
        sampling = (plan.num_sampled_rows > 0).nonzero()[0]
        for seed, index in zip(plan.sampling.seed.tolist(), sampling.tolist(), strict=True):
            end, count = int(ends[index]), int(plan.num_sampled_rows[index]) - 1
            text = self._texts[seed]
            if count:
                first = int(rows.seq_lens[index]) - count - len(text.prompt)
                text.proposals[first] = tokens[end - count : end].tolist()
                tokens[end - count : end] = self._never_drawn
        return self._model.launch(replace(plan, rows=replace(rows, token_ids=tokens)))


def record(settings: ServingSettings, texts: Sequence[RecordedText], max_tokens: int) -> None:
    """Fill in the texts, of a pair in this process."""
    target, draft = load_pair(settings)
    config = json.loads((Path(settings.checkpoint) / "config.json").read_text(encoding="utf-8"))
    fixed = replace(settings, speculation_policy="fixed", proposer="eagle3", max_num_seqs=STREAMS)
    engine = Engine(
        RejectingTarget(target, config["pad_token_id"], texts),
        draft,
        settings=scheduler_settings(fixed),
        eos_token_ids=load_tokenizer(settings.checkpoint).eos_token_ids,
    )
    logging.disable(logging.WARNING)  # a draft of which nothing is accepted is what this makes
    engine.start()
    engine.wait_until_ready(60)
    for text, tokens in zip(texts, run_all(engine, texts, max_tokens), strict=True):
        text.tokens = tokens
    engine.stop()
    logging.disable(logging.NOTSET)


def run_all(engine: Engine, texts: Sequence[RecordedText], max_tokens: int) -> list[list[int]]:
    """The tokens of each, asked for all at once: a request's seed is its text's number."""
    ended, found = threading.Semaphore(0), [list[int]() for _ in texts]

    def note(delta: TokenDelta) -> None:
        found[int(delta.request_id)] += delta.token_ids
        if delta.finish_reason is not None:
            ended.release()

    with engine._loop.changed:  # the engine sees none before it sees all: its rounds are the same each time
        for seed, text in enumerate(texts):
            sampling = SamplingParams(max_tokens=max_tokens, temperature=text.temperature, seed=seed, ignore_eos=True)
            request = GenerateRequest(
                request_id=str(seed),
                prompt_token_ids=tuple(text.prompt),
                sampling=sampling,
                num_speculative_tokens=MAX_SPECULATIVE_TOKENS,
            )
            engine.submit(request, note)
    for _ in texts:
        ended.acquire()
    return found


def save(path: Path, cells: dict[str, list[RecordedText]]) -> None:
    """Write texts by cell."""
    path.write_text(json.dumps({name: [asdict(text) for text in texts] for name, texts in cells.items()}))


def load(path: Path) -> dict[str, list[RecordedText]]:
    """Read what `save` wrote."""
    cells: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
    return {name: [_read(values) for values in texts] for name, texts in cells.items()}


def _read(values: dict[str, Any]) -> RecordedText:
    proposals = {int(place): tokens for place, tokens in values.pop("proposals").items()}
    return RecordedText(**values, proposals=proposals)
