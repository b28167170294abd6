"""Decoding without an engine: whole prefixes, no KV, no speculation, every sampling input built from scratch.

What the engine emits must equal this, token for token.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.types.grammar import Grammar
from kimi_backend.types.request import GenerateRequest
from kimi_kernels.sampling.naive import sample_tokens
from kimi_kernels.sampling_inputs import BANNED_FOREVER
from support.sampling_cases import SequenceCase, sampling_tensors
from support.scripted_logits import LogitScript, mix, prefix_hash

Compile = Callable[[Grammar], CompiledGrammar]


def decode_plainly(
    script: LogitScript,
    requests: Sequence[GenerateRequest],
    *,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    compile_grammar: Compile | None = None,
) -> list[list[int]]:
    """Output tokens of each request, a stop token included. Requests must name their seeds.

    Args:
        compile_grammar: of requests with a grammar, whose matcher begins anew at every token.
    """
    cases = [_case(request, eos_token_ids) for request in requests]
    limits = [_max_output(request, max_model_len) for request in requests]
    stops = [_stop_ids(request, eos_token_ids) for request in requests]
    hashes = np.array([prefix_hash(list(request.prompt_token_ids)) for request in requests], np.uint64)
    alive = np.arange(len(requests))
    while len(alive):
        live = [cases[index] for index in alive]
        allowed = [_allowed(requests[i], cases[i].output, compile_grammar) for i in alive]
        inputs, rows = sampling_tensors(live, _mask(script.vocab_size, allowed))
        drawn = sample_tokens(torch.from_numpy(script.logits(hashes[alive])), inputs, rows).token_ids.numpy()
        hashes[alive] = mix(hashes[alive], drawn)
        going = []
        for index, token_id in zip(alive.tolist(), drawn.tolist(), strict=True):
            cases[index].output.append(token_id)
            if token_id not in stops[index] and len(cases[index].output) < limits[index]:
                going.append(index)
        alive = np.array(going, np.int64)
    return [case.output for case in cases]


def _stop_ids(request: GenerateRequest, eos_token_ids: frozenset[int]) -> set[int]:
    return set(request.sampling.stop_token_ids) | (set() if request.sampling.ignore_eos else set(eos_token_ids))


def _max_output(request: GenerateRequest, max_model_len: int) -> int:
    room = max_model_len - len(request.prompt_token_ids)
    wanted = request.sampling.max_tokens
    return room if wanted is None else min(wanted, room)


def _case(request: GenerateRequest, eos_token_ids: frozenset[int]) -> SequenceCase:
    params = request.sampling
    assert params.seed is not None
    bans = dict.fromkeys(
        sorted(_stop_ids(request, eos_token_ids)) if params.min_tokens else (),
        len(request.prompt_token_ids) + params.min_tokens,
    )
    bans |= {word[0]: BANNED_FOREVER for word in params.bad_words if len(word) == 1}
    return SequenceCase(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        prompt=list(request.prompt_token_ids),
        bias=dict(params.logit_bias),
        bans=bans,
        bad_words=[list(word) for word in params.bad_words],
    )


def _allowed(request: GenerateRequest, output: list[int], compile_grammar: Compile | None = None) -> tuple[int, ...]:
    """The tokens that may come next; none given allows all."""
    budget = request.sampling.thinking_budget
    if budget is not None and len(output) == budget.num_tokens and budget.end_token_id not in output:
        return (budget.end_token_id,)
    allowed, grammar = request.sampling.allowed_token_ids, request.sampling.grammar
    if grammar is None:
        return allowed
    assert compile_grammar is not None
    fitting = _fitting(compile_grammar(grammar), grammar, output)
    return tuple(sorted(fitting & set(allowed))) if allowed else tuple(sorted(fitting))


def _fitting(compiled: CompiledGrammar, grammar: Grammar, output: list[int]) -> set[int]:
    """The tokens that a grammar lets follow an output."""
    words = compiled.text_mask.copy()
    begin = grammar.begins_after
    if begin is not None and begin not in output:
        assert grammar.must_begin
        return _set_bits(words) | {begin}
    matcher = compiled.matcher()
    for token_id in output[0 if begin is None else output.index(begin) + 1 :]:
        assert matcher.accept(token_id)
    words[:] = 0
    matcher.fill(words)
    return _set_bits(words)


def _set_bits(words: npt.NDArray[np.int32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def _mask(vocab_size: int, allowed: Sequence[tuple[int, ...]]) -> torch.Tensor | None:
    if not any(allowed):
        return None
    bits = np.ones((len(allowed), -(-vocab_size // 32) * 32), np.uint8)
    for row, token_ids in enumerate(allowed):
        if token_ids:
            bits[row] = 0
            bits[row, list(token_ids)] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
