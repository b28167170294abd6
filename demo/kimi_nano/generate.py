"""Lets the target write: many sequences side by side over a dense cache, greedy or with the server's own noise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_kernels.sampling.gumbel import gumbel_from_bits
from kimi_kernels.sampling.philox import noise_bits
from kimi_nano.captured import Captured
from kimi_nano.dataset import pad
from kimi_nano.target import NanoTarget

WORTH_CAPTURING = 32
"""Tokens from which on a GPU records a decoding step instead of launching it kernel by kernel."""
Caches = list[tuple[Tensor, Tensor]]
"""Each layer's keys [B, N, S, D] and values [B, N, S, V]."""


def token_noise(seeds: Tensor, token_index: Tensor, vocab_size: int) -> Tensor:
    """[R, vocab_size] float32 Gumbel noise, as docs/sampling.md defines it."""
    return gumbel_from_bits(noise_bits(seeds, token_index, vocab_size))


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, token_index: Tensor) -> Tensor:
    """[R] int64: the argmax of each row, with noise where the temperature is not 0.

    Args:
        logits: [R, vocab_size]. temperature: [R] float32. seeds, token_index: [R] int64.
    """
    best = logits.argmax(dim=1)
    noisy = (temperature > 0).nonzero().flatten()
    if len(noisy):
        scaled = logits[noisy].float() * (1 / temperature[noisy])[:, None]
        noise = token_noise(seeds[noisy], token_index[noisy], logits.shape[1])
        best[noisy] = (scaled.double() + noise.double()).argmax(dim=1)
    return best


@torch.no_grad()
def generate(
    target: NanoTarget,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    temperature: Tensor,
    seeds: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """[B, num_tokens] int64: what follows each prompt; end-of-text tokens do not end it.

    Args:
        temperature, seeds: [B], on the target's device.
    """
    device = target.device
    tokens, lengths = pad(prompts, device)
    logits, caches = _prefill(target, tokens, lengths, num_tokens, dtype)
    rows = torch.arange(len(prompts), device=device)
    written = torch.empty(len(prompts), num_tokens, dtype=torch.int64, device=device)

    def decode(tokens_and_position: Tensor) -> Tensor:
        return _decode(target, tokens_and_position[0], tokens_and_position[1], rows, caches, dtype)

    step_of = Captured(decode) if device.type == "cuda" and num_tokens >= WORTH_CAPTURING else decode
    for step in range(num_tokens):
        position = lengths + step
        written[:, step] = draw(logits, temperature, seeds, position)
        if step + 1 < num_tokens:
            logits = step_of(torch.stack((written[:, step], position)))
    return written


def _prefill(
    target: NanoTarget, tokens: Tensor, lengths: Tensor, num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Caches]:
    """Logits after each prompt, and caches with room for what follows. Padding comes after every real token, so
    that no real row sees it, and its cache rows are overwritten or masked."""
    from kimi_nano.formulas import causal_attention

    batch, length = tokens.shape
    residual = target.weight("model.embed_tokens.weight")[tokens.flatten()]
    cos_sin = target.cos_sin[:length].repeat(batch, 1)
    caches: Caches = []
    for layer in range(target.config.num_hidden_layers):
        q, k, v = target.layer_inputs(layer, residual, cos_sin, dtype)
        heads = causal_attention(q, k, v, target.config.softmax_scale, length)
        caches.append((_room(k, batch, num_tokens), _room(v, batch, num_tokens)))
        residual, _ = target.finish_layer_eager(layer, residual, heads, dtype)
    last = torch.arange(batch, device=tokens.device) * length + lengths - 1
    return target.logits(target.norm(residual[last]), dtype), caches


def _room(x: Tensor, batch: int, num_tokens: int) -> Tensor:
    """[B * L, N, D] -> [B, N, L + num_tokens, D]."""
    x = x.unflatten(0, (batch, -1)).transpose(1, 2)
    return torch.cat((x, x.new_zeros(*x.shape[:2], num_tokens, x.shape[3])), dim=2)


def _decode(
    target: NanoTarget, tokens: Tensor, position: Tensor, rows: Tensor, caches: Caches, dtype: torch.dtype
) -> Tensor:
    """Logits of one row of each sequence."""
    residual = target.weight("model.embed_tokens.weight")[tokens]
    cos_sin = target.cos_sin[position]
    size = caches[0][0].shape[2]
    is_future = torch.arange(size, device=tokens.device) > position[:, None]
    for layer, (keys, values) in enumerate(caches):
        q, k, v = target.layer_inputs(layer, residual, cos_sin, dtype)
        keys[rows, :, position], values[rows, :, position] = k, v
        scores = torch.einsum("bnd,bnsd->bns", q, keys).float() * target.config.softmax_scale
        shares = scores.masked_fill(is_future[:, None], float("-inf")).softmax(dim=-1).to(v.dtype)
        heads = torch.einsum("bns,bnsv->bnv", shares, values).flatten(1)
        residual, _ = target.finish_layer_eager(layer, residual, heads, dtype)
    return target.logits(target.norm(residual), dtype)
