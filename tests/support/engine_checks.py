"""Checks that the engine must pass, small enough to be repeated with a planted fault in place."""

import random
from dataclasses import replace

import numpy as np

from kimi_backend.engine.engine import Engine
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import FinishReason, GenerateRequest, SamplingParams
from support.check_errors import (
    PoisonSpreadError,
    RejectedDraftError,
    WrongCountsError,
    WrongTextError,
    WrongTokensError,
)
from support.engine_runs import EngineHarness, Outcome, generate
from support.letter_tokenizer import LetterTokenizer
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.recording_client import RecordingClient
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe
from support.waiting import PATIENCE_S

VOCAB = 32
EOS = frozenset({5})
MAX_LEN = 64
SCRIPT = LogitScript(VOCAB)
POISON = 7


def check_tokens(num_requests: int = 40, *, checks_slots: bool = True) -> None:
    """Every request gets the tokens of plain decoding, with small blocks, chunks and prefix hits.

    The second half continues what the first half got, as a conversation does, so it finds blocks of output too.

    Args:
        checks_slots: False leaves the tokens alone to tell that something is wrong; the models read whatever is there.

    Raises:
        StaleSlotError, AuxMismatchError, WrongTokensError, WrongCountsError: whichever is seen first.
    """
    sizes = {"block_size": 2, "max_model_len": MAX_LEN}
    harness = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT, num_blocks=1600, **sizes), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT, num_blocks=1600, **sizes), SCRIPT),
        SchedulerSettings(max_num_seqs=100, max_num_batched_tokens=200),
        EOS,
    )
    requests = random_requests(random.Random(1), num_requests, VOCAB, longest_prompt=12, longest_output=20)
    for model in (harness.core._target, harness.core._draft):
        assert isinstance(model, ScriptedTarget | ScriptedDraft)
        model.checks_slots = checks_slots
    beginnings = [harness.add(request) for request in requests]
    harness.run()
    continued = [
        harness.add(replace(o.request, prompt_token_ids=(*o.request.prompt_token_ids, *o.token_ids, 1, tail)))
        for o in beginnings
        for tail in (2, 3)
    ]
    harness.run()
    assert sum(outcome.sequence.num_cached_tokens or 0 for outcome in continued) > 10 * num_requests
    all_requests = [outcome.request for outcome in harness.outcomes]
    expected = decode_plainly(SCRIPT, all_requests, eos_token_ids=EOS, max_model_len=MAX_LEN)
    for outcome, tokens in zip(harness.outcomes, expected, strict=True):
        if outcome.token_ids != tokens:
            raise WrongTokensError(f"{outcome.request}: {outcome.token_ids}, plain decoding gives {tokens}")
        check_identities(outcome)


def check_identities(outcome: Outcome) -> None:
    """completion_tokens = 1 + Σ(accepted + 1) − truncated; one end. Raises WrongCountsError."""
    first, *rest = outcome.steps
    truncated = sum(step.num_accepted + 1 - len(step.token_ids) for step in outcome.steps)
    identities = {
        "no draft token in the first step": first.num_draft_tokens == 0,
        "tokens": len(outcome.token_ids) == 1 + sum(step.num_accepted + 1 for step in rest) - truncated,
        "one end": len(outcome.finishes) == 1,
        "the end in the last step": outcome.steps[-1].finish is not None,
        "KV of known tokens alone": outcome.sequence.target_len <= outcome.sequence.num_tokens,
    }
    broken = [name for name, holds in identities.items() if not holds]
    if broken:
        raise WrongCountsError(f"{outcome.request}: {', '.join(broken)}")


def check_equal_draft_is_always_accepted(num_requests: int = 60) -> None:
    """A draft whose distribution is the target's, its vocabulary permuted, is accepted at every setting."""
    requests = [
        replace(r, sampling=replace(r.sampling, allowed_token_ids=()))
        for r in random_requests(random.Random(5), num_requests, VOCAB, longest_prompt=12, longest_output=20)
    ]
    columns = np.random.default_rng(1).permutation(VOCAB)
    draft = ScriptedDraft(describe("draft", SCRIPT, num_blocks=4000), SCRIPT, 1.0, columns)
    outcomes = generate(ScriptedTarget(describe("target", SCRIPT, num_blocks=4000), SCRIPT), draft, requests, None, EOS)
    rounds = [r for outcome in outcomes for r in outcome.rounds]
    assert len(rounds) > num_requests
    check_all_accepted(rounds)


def check_all_accepted(rounds: list[tuple[int, int]]) -> None:
    """rounds: (drafted, accepted) of each. Raises RejectedDraftError."""
    if any(accepted != drafted for drafted, accepted in rounds):
        raise RejectedDraftError(f"(drafted, accepted) {rounds}")


def check_poison_stays_alone() -> None:
    """A row of NaN ends its own sequence with an error; the others get what they would get without it.

    Raises:
        PoisonSpreadError: it is not so.
    """
    script = LogitScript(VOCAB, nan_token_id=POISON)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=(i % VOCAB, 3),
            sampling=SamplingParams(seed=i, max_tokens=12, temperature=1.5),
            num_speculative_tokens=i % 4,
        )
        for i in range(40)
    ]
    expected = decode_plainly(SCRIPT, requests, eos_token_ids=frozenset({POISON}), max_model_len=128)
    target = ScriptedTarget(describe("target", script, num_blocks=1000), script)
    draft = ScriptedDraft(describe("draft", SCRIPT, num_blocks=1000), SCRIPT)
    outcomes = generate(target, draft, requests)
    num_failed = 0
    for outcome, tokens in zip(outcomes, expected, strict=True):
        if outcome.request.prompt_token_ids[0] == POISON:
            continue
        # The token after the poison cannot be drawn, unless the poison was the last token anyway.
        is_poisoned = tokens[-1] == POISON and len(tokens) < 12
        reason = FinishReason.ERROR if is_poisoned else FinishReason.LENGTH
        if (outcome.token_ids, outcome.finishes[0].reason) != (tokens, reason):
            raise PoisonSpreadError(f"{outcome.request}: {outcome.token_ids} {outcome.finishes}, {tokens} {reason}")
        num_failed += is_poisoned
    assert 3 < num_failed < 37


def check_stop_strings() -> None:
    """Through the threaded engine: the text ends before the stop string, with one final delta and right counts.

    Raises:
        WrongTextError, WrongCountsError: of what the client was sent.
    """
    engine = Engine(
        ScriptedTarget(describe("target", SCRIPT), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT), SCRIPT, 1.0),
        tokenizer=LetterTokenizer(VOCAB),
    )
    engine.start()
    engine.wait_until_ready(PATIENCE_S)
    sampling = SamplingParams(seed=7, max_tokens=60, temperature=1.2)
    request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=sampling, num_speculative_tokens=7)
    plain = RecordingClient()
    engine.submit(request, plain)
    plain.wait()
    stops = [plain.text[first : first + 3] for first in (9, 22, 35)]
    clients = [RecordingClient() for _ in stops]
    for stop, client in zip(stops, clients, strict=True):
        engine.submit(replace(request, sampling=replace(sampling, stop=(stop,))), client)
        client.wait()
    engine.drain(PATIENCE_S)
    for client in (plain, *clients):
        client.check()
    for stop, client in zip(stops, clients, strict=True):
        cut, final = plain.text.index(stop), client.deltas[-1]
        if client.text != plain.text[:cut]:
            raise WrongTextError(f"{client.text!r}, up to {stop!r} it is {plain.text[:cut]!r}")
        assert (final.finish_reason, final.matched_stop) == (FinishReason.STOP, stop)
        assert final.stats is not None
        counts = (client.token_ids, final.stats.num_output_tokens)
        if counts != (plain.token_ids[: cut + 3], cut + 3):
            raise WrongCountsError(f"{counts}, up to {stop!r} there are {cut + 3} tokens")
