"""The runners, called by somebody who is not their orchestrator."""

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from attack_suite.plans import STEP_ID, fuzzed_plans, good_draft_plan, plans_over_every_block
from attack_suite.victim import RUNNERS, SECRET_BYTES, Broken, Victim, tensor
from kimi_backend.types import codec

_DESCRIBE = np.ones(1, np.bool_)
_FORMS: tuple[tuple[Any, str], ...] = (
    (np.zeros(0, np.uint8), "UINT8"),
    (np.zeros(31, np.uint8), "UINT8"),
    (np.zeros(33, np.uint8), "UINT8"),
    (np.zeros((1, 32), np.uint8), "UINT8"),
    (np.zeros(32, np.int8), "INT8"),
    (np.zeros(4, np.int64), "INT64"),
    (np.array([b"x" * 32], np.object_), "BYTES"),
)
"""Lengths, types and shapes that are not the secret's."""
_MARK = b"\x5e\xad\xbe\x6f"
"""A number of eight bytes made of it is positive in either order."""
_REFUSED = "StatusCode.INVALID_ARGUMENT"


def _must_be_refused(what: str, answer: str, reason: str = "") -> None:
    if not answer.startswith(_REFUSED) or reason not in answer:
        raise Broken(f"{what}: {answer[:200]}")


def describe_without_the_secret(victim: Victim) -> str:
    """A description gives away handles of memory."""
    wrong = tensor("SECRET", np.zeros(SECRET_BYTES, np.uint8), "UINT8")
    for model in RUNNERS:
        ask = tensor("DESCRIBE", _DESCRIBE, "BOOL")
        _must_be_refused("no secret", victim.call_runner(model, ask))
        _must_be_refused("another secret", victim.call_runner(model, wrong, ask), "spec_ensemble alone")
        body = {"inputs": [{"name": "DESCRIBE", "datatype": "BOOL", "shape": [1], "data": [True]}]}
        status, _ = victim.post(f"models/{model}/infer", body)
        if status != 400:
            raise Broken(f"HTTP without the secret: {status}")
        status, _ = victim.post(f"models/{model}/generate", {"DESCRIBE": True})
        if status != 400:
            raise Broken(f"generate without the secret: {status}")
        for array, datatype in _FORMS:
            _must_be_refused(
                f"{datatype} {array.shape}", victim.call_runner(model, tensor("SECRET", array, datatype), ask)
            )
    return f"DESCRIBE on gRPC, infer and generate; {len(_FORMS)} forms of the secret"


def plan_without_the_secret(victim: Victim) -> str:
    """Steps over every block, beside a request that runs: its text stays, and no step is run."""
    wrong = tensor("SECRET", np.zeros(SECRET_BYTES, np.uint8), "UINT8")
    step = tensor("STEP", np.full(1, STEP_ID, np.int64), "INT64")
    request = {"text_input": "the same", "max_tokens": 100, "ignore_eos": True, "seed": 3}
    expected = victim.generate(**request)
    answers: list[tuple[str, str]] = []

    def send(model: str, what: str, *given: Any) -> None:
        answers.append((what, victim.call_runner(model, *given)))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(victim.generate, **request)
        for plan in map(codec.encode, plans_over_every_block()):
            for name in ("PLAN", "NEXT_PLAN"):
                given = tensor(name, plan, "UINT8")
                send("kimi_target", name, given)
                send("kimi_target", f"{name} and STEP", given, step)
                send("kimi_target", f"{name} and another secret", wrong, given, step)
        found = running.result()
    if expected[0] != 200 or found[1].get("text_output") != expected[1]["text_output"]:
        texts = [reply.get("text_output") for _, reply in (expected, found)]
        raise Broken(f"a neighbour's text was {texts[0]!r}, it became {texts[1]!r} {found[0]}")
    draft_plan = tensor("PLAN", codec.encode(good_draft_plan(1, 0)), "UINT8")
    send("eagle3_draft", "a draft's PLAN", draft_plan)
    send("eagle3_draft", "a draft's PLAN and another secret", wrong, draft_plan)
    for what, answer in answers:
        _must_be_refused(what, answer, "alone" if "another" in what else "")
    return f"{len(answers)} plans; a neighbour's text is the same"


def semaphores_that_are_a_file(victim: Victim) -> str:
    """A handle that names a file which this user has open, in each form that a handle has had."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "victim")
        content = (7).to_bytes(8, "little") + bytes(2**16 - 8)
        path.write_bytes(content)
        with path.open("r+b") as file:
            for handle in _handles(file.fileno()):
                handed = tensor("SEMAPHORES", np.frombuffer(handle, np.uint8), "UINT8")
                ask = tensor("DESCRIBE", _DESCRIBE, "BOOL")
                _must_be_refused("no secret", victim.call_runner("kimi_target", handed, ask))
        if path.read_bytes() != content:
            raise Broken("the file was written")
    return "no byte changed"


def _handles(descriptor: int) -> Iterator[bytes]:
    fields: dict[str, Any] = {"process_id": os.getpid(), "descriptor": descriptor}
    yield json.dumps({**fields, "shape": [8, 256], "number": 7}).encode()
    memory = json.dumps({**fields, "num_bytes": 2**16, "token": (7).to_bytes(32, "little").hex()})
    yield json.dumps({"memory": memory, "shape": [8, 256]}).encode()


def header_that_is_not_quoted(victim: Victim) -> str:
    """The bytes of a bad header are not sent back, nor is anything of the secret."""
    marks = tensor("PLAN", np.frombuffer(_MARK * 16, np.uint8), "UINT8")
    quotations = (_MARK.hex(), _MARK[::-1].hex(), victim.runner_secret.hex())
    for model in RUNNERS:
        answers = (
            victim.call_runner(model, marks),
            victim.call_runner(model, marks, *_asked_of(model)),
            victim.call_runner(model, marks, *_asked_of(model), with_secret=True),
        )
        for answer in answers:
            if any(quotation in answer.lower() for quotation in quotations):
                raise Broken(answer)
            _must_be_refused("marks", answer)
        _must_be_refused("marks of a caller who knows the secret", answers[-1], "header")
    return "no byte of it"


def _asked_of(model: str) -> list[Any]:
    """The reply that a step of the target asks for; the draft's is its own."""
    return [tensor("STEP", np.full(1, STEP_ID, np.int64), "INT64")] if model == "kimi_target" else []


def fuzz(victim: Victim, count: int, seed: int) -> str:
    """Plans of a caller who knows the secret: each is run or refused; none is INTERNAL, kills or holds a runner."""
    told = []
    draft = victim.describe_draft()
    row_bytes = 4 * draft.hidden_size * len(draft.aux_layer_ids)
    aux = tensor("AUX_HIDDEN_STATES", np.zeros((16, row_bytes), np.uint8), "UINT8")
    for role, model in zip(("target", "draft"), RUNNERS, strict=True):
        ends = {"OK": 0, _REFUSED: 0}
        for number, plan in enumerate(fuzzed_plans(role, count, draft.vocab_size, seed)):
            given = [tensor("PLAN", plan, "UINT8"), *([aux] if role == "draft" else [])]
            answer = victim.call_runner(model, *given, *_asked_of(model), with_secret=True)
            code = answer.split(":")[0]
            if code not in ends:
                raise Broken(f"plan {number} of seed {seed} to {model}: {answer[:200]}")
            ends[code] += 1
        if not ends["OK"]:
            raise Broken(f"{model}: none of {count} plans was run, so that no check behind the first was tried")
        told.append(f"{model}: {ends['OK']} run, {ends[_REFUSED]} refused")
    return "; ".join(told)


RUNNER_ATTACKS = (
    describe_without_the_secret,
    plan_without_the_secret,
    semaphores_that_are_a_file,
    header_that_is_not_quoted,
)
