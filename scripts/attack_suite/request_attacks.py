"""Requests to the orchestrator that take something from the requests beside them."""

import json
import string
import tempfile
from pathlib import Path
from typing import Any

from attack_suite.access_attacks import load_body
from attack_suite.victim import Broken, Victim
from kimi_backend.text.tokenizer import Tokenizer

_PROMPT = "Once upon a time there was a model that served many people at once, and none of them could see the others. "


def _pair_of(tokenizer: Tokenizer) -> "tuple[int, str]":
    """A token and the text that is this token twice."""
    for character in string.printable:
        first, both = tokenizer.encode(character), tokenizer.encode(2 * character)
        if len(first) == 1 and both == 2 * first:
            return first[0], 2 * character
    raise Broken("no character stands twice as two tokens")


def _cached(victim: Victim, prompt: str) -> int:
    status, reply = victim.generate(text_input=prompt, max_tokens=4)
    if status != 200:
        raise Broken(f"the neighbour was answered {status} {reply}")
    return int(_statistics(reply)["num_cached_tokens"])


def _statistics(reply: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(reply["statistics"]))


def request_that_bans_itself(victim: Victim) -> str:
    """One token is allowed, and forbidden after itself: a 400, and the prefix stays in the cache for the others."""
    token_id, word = _pair_of(victim.tokenizer)
    prompt = _PROMPT * 4
    for _ in range(2):
        before = _cached(victim, prompt)
    if not before:
        raise Broken("the prompt is too short to be cached")
    for k in (0, 3):
        status, reply = victim.generate(
            text_input=prompt,
            allowed_token_ids=[token_id],
            bad_words=[word],
            max_tokens=8,
            num_speculative_tokens=k,
        )
        if status != 400 or "allowed_token_ids, bad_words" not in str(reply):
            raise Broken(f"k = {k}: {status} {reply}")
        after = _cached(victim, prompt)
        if after != before:
            raise Broken(f"k = {k}: {before} tokens were cached before, {after} after")
    return f"400, {before} cached tokens stay"


def trace_of_tensors(victim: Victim) -> str:
    """An operator's trace of level TENSORS, with the admin secret: neither the runners' secret nor their plans."""
    client = victim.grpc()
    headers = {"triton-grpc-protocol-kimi-admin": victim.admin_secret}

    def trace(*levels: str) -> None:
        for model in ("", "spec_ensemble", "kimi_target", "eagle3_draft"):
            client.update_trace_settings(model, {"trace_level": [*levels], "trace_rate": "1"}, headers=headers)

    try:
        trace("TIMESTAMPS", "TENSORS")
        victim.generate(text_input="a", max_tokens=4)
        trace("OFF")
    finally:
        client.close()
    text = b"".join(path.read_bytes() for path in victim.trace_file.parent.glob(f"{victim.trace_file.name}*"))
    if b"text_input" not in text:
        raise Broken("not even the client's request is traced")
    if any(name in text for name in (b"SECRET", b"kimi_target", b"eagle3_draft")):
        raise Broken("calls of the runners are traced")
    return "calls of the runners are not in it"


def load_with_the_secret_in_the_wrong_place(victim: Victim) -> str:
    """Send the secret in the query, in the body, as a cookie: only the header counts."""
    secret, path = victim.admin_secret, "/v2/repository/models/intruder/load"
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "mark")
        body = load_body(str(mark))
        in_body = json.loads(body)
        in_body["parameters"]["kimi-admin"] = secret
        attempts: dict[str, tuple[str, str, dict[str, str]]] = {
            "query": (f"{path}?kimi-admin={secret}", body, {}),
            "body": (path, json.dumps(in_body), {}),
            "cookie": (path, body, {"Cookie": f"kimi-admin={secret}"}),
        }
        for place, (target, sent, headers) in attempts.items():
            status, reply = victim.send("POST", target, sent, headers)
            if status != 403 or mark.exists():
                ran = "the code ran" if mark.exists() else "the code did not run"
                raise Broken(f"secret in the {place}: {status} {reply[:200]!r}, {ran}")
    return f"403 for {', '.join(attempts)}"


def unary_twin(victim: Victim) -> str:
    """It is no way around a limit, to a runner, or to a stream that nobody reads."""
    refused: tuple[dict[str, Any], ...] = (
        {"text_input": "a" * (8 * 2**20 + 1)},
        {"text_input": "a", "stop": ["x"] * 1025},
        {"text_input": "a", "stream": True},
        {"text_input": "a", "sampling_parameters": '{"stream": true}'},
        {"text_input": "a", "max_tokens": -1},
        {"text_input": "a", "SECRET": "x"},
        {"text_input": "a", "PLAN": "x"},
        {"text_input": "a", "model_name": "kimi_target"},
    )
    for fields in refused:
        status, reply = victim.post("models/spec_ensemble_unary/generate", fields)
        if status != 400:
            raise Broken(f"{list(fields)}: {status} {reply[:200]!r}")
    status, reply = victim.post("models/spec_ensemble_unary/generate", {"text_input": "a", "max_tokens": 4})
    if status != 200 or not json.loads(reply)["statistics"]:
        raise Broken(f"{status} {reply[:200]!r}")
    return f"400 for {len(refused)}"


REQUEST_ATTACKS = (request_that_bans_itself, load_with_the_secret_in_the_wrong_place, unary_twin)
