"""Attention of many new tokens: non-absorbed MLA (192/128) and the draft's multi-head attention."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_cases import Case, Prepared, num_input_sets, relative_error
from kimi_kernels import AttentionBatch, KernelSet

LORA_RANK, NOPE, ROPE, VALUE, BLOCK = 512, 128, 64, 128, 64
HEAD_DIM = 128
PREFILL_ERROR = 1.2e-2
"""bf16 up-projected keys and values, weights and result: 2^-9 each."""
MHA_ERROR = 8e-3
PROMISED_FLOPS_PER_US = 350e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    seqs: int
    new: int
    prefix: int
    heads: int

    @property
    def length(self) -> int:
        return self.prefix + self.new

    @property
    def name(self) -> str:
        return f"{self.seqs}x{self.new} new over {self.prefix} h{self.heads}"

    @property
    def num_pairs(self) -> float:
        """(query, key) pairs of one head."""
        return self.seqs * (self.new * self.prefix + self.new * (self.new + 1) / 2)

    @property
    def attention_flops(self) -> float:
        return 2 * self.heads * self.num_pairs * (NOPE + ROPE + VALUE)

    @property
    def projection_flops(self) -> float:
        return 2.0 * self.heads * self.seqs * self.length * LORA_RANK * (NOPE + VALUE)


def cases(kernels: KernelSet) -> list[Case]:
    prompts = [
        (Prompt(seqs=1, new=8192, prefix=0, heads=8), "FA3 236, cuDNN 347"),
        (Prompt(seqs=4, new=2048, prefix=0, heads=8), "FA3 83"),
        (Prompt(seqs=1, new=4096, prefix=0, heads=64), "FA3 496"),
        (Prompt(seqs=1, new=2048, prefix=30720, heads=8), ""),
        (Prompt(seqs=8, new=256, prefix=4096, heads=8), ""),
    ]
    found = [
        Case(
            op="mla_prefill",
            name=prompt.name,
            num_bytes=prompt.seqs * prompt.length * (LORA_RANK + ROPE) * 2
            + prompt.seqs * prompt.new * prompt.heads * 640,
            num_flops=prompt.attention_flops + prompt.projection_flops,
            prepare=functools.partial(prepare_mla, kernels, prompt),
            limit_us=(prompt.attention_flops + prompt.projection_flops) / PROMISED_FLOPS_PER_US if not index else None,
            peer=peer,
        )
        for index, (prompt, peer) in enumerate(prompts)
    ]
    for prompt, kv_heads, window in (
        (Prompt(seqs=64, new=1, prefix=8191, heads=64), 8, None),
        (Prompt(seqs=1, new=1, prefix=8191, heads=64), 8, None),
        (Prompt(seqs=64, new=4, prefix=8188, heads=8), 8, None),
        (Prompt(seqs=64, new=1, prefix=8191, heads=64), 8, 1024),
        (Prompt(seqs=1, new=8192, prefix=0, heads=64), 8, None),
    ):
        seen = prompt.length if window is None else min(window, prompt.length)
        found.append(
            Case(
                op="mha_attention",
                name=f"{prompt.name}/{kv_heads}{f' window {window}' if window else ''}",
                num_bytes=prompt.seqs * (seen * kv_heads + prompt.new * prompt.heads) * HEAD_DIM * 4.0,
                num_flops=4 * prompt.heads * (prompt.num_pairs if window is None else prompt.seqs * seen) * HEAD_DIM,
                prepare=functools.partial(prepare_mha, kernels, prompt, kv_heads, window),
            )
        )
    return found


def batches_over(prompt: Prompt, num_blocks: int, count: int) -> list[AttentionBatch]:
    """Batches of the same shape, each over other blocks of one pool."""
    blocks_a_seq = -(-prompt.length // BLOCK)
    return [
        AttentionBatch(
            cu_seqlens_q=torch.arange(prompt.seqs + 1, dtype=torch.int32, device="cuda") * prompt.new,
            seq_lens=torch.full((prompt.seqs,), prompt.length, dtype=torch.int32, device="cuda"),
            block_table=torch.randperm(num_blocks, device="cuda")[: prompt.seqs * blocks_a_seq]
            .view(prompt.seqs, blocks_a_seq)
            .to(torch.int32),
            num_tokens=prompt.seqs * prompt.new,
            max_query_len=prompt.new,
            max_seq_len=prompt.length,
        )
        for _ in range(count)
    ]


def prepare_mla(kernels: KernelSet, prompt: Prompt) -> Prepared:
    num_blocks = prompt.seqs * -(-prompt.length // BLOCK) + 64
    cache = torch.randn(num_blocks, BLOCK, LORA_RANK + ROPE, device="cuda").to(torch.bfloat16)
    w_uk = (torch.randn(prompt.heads, NOPE, LORA_RANK, device="cuda") * LORA_RANK**-0.5).to(torch.bfloat16)
    w_uv = (torch.randn(prompt.heads, LORA_RANK, VALUE, device="cuda") * LORA_RANK**-0.5).to(torch.bfloat16)
    q_bytes = prompt.seqs * prompt.new * prompt.heads * (NOPE + ROPE) * 2
    count = num_input_sets(q_bytes + prompt.seqs * prompt.length * 1152, at_most=16)
    queries = [
        torch.randn(prompt.seqs * prompt.new, prompt.heads, NOPE + ROPE, device="cuda").to(torch.bfloat16)
        for _ in range(count)
    ]
    batches = batches_over(prompt, num_blocks, count)
    scale = (NOPE + ROPE) ** -0.5

    def call(q: Tensor, batch: AttentionBatch) -> Tensor:
        return kernels.mla_prefill(q, cache, w_uk, w_uv, batch, scale)

    def check() -> float:
        out = call(queries[0], batches[0]).view(prompt.seqs, prompt.new, prompt.heads, VALUE)
        latents = cache[batches[0].block_table[-1].long()].flatten(0, 1)[: prompt.length].float()
        q = queries[0].view(prompt.seqs, prompt.new, prompt.heads, -1)[-1].float()
        error = 0.0
        for head in (0, prompt.heads - 1):
            keys = torch.cat([latents[:, :LORA_RANK] @ w_uk[head].float().T, latents[:, LORA_RANK:]], dim=1)
            expected = attend(q[:, head], keys, latents[:, :LORA_RANK] @ w_uv[head].float(), scale, None)
            error = max(error, relative_error(out[-1, :, head], expected, PREFILL_ERROR))
        return error

    return Prepared(calls=[functools.partial(call, q, b) for q, b in zip(queries, batches, strict=True)], check=check)


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """One head in float32; q: the last rows of the sequence that keys and values belong to."""
    scores = q @ keys.T * scale
    key = torch.arange(keys.shape[0], device=q.device)[None, :]
    last = keys.shape[0] - q.shape[0] + torch.arange(q.shape[0], device=q.device)[:, None]
    hidden = key > last if window is None else (key > last) | (key <= last - window)
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values


def prepare_mha(kernels: KernelSet, prompt: Prompt, kv_heads: int, window: int | None) -> Prepared:
    num_blocks = max(8192, prompt.seqs * -(-prompt.length // BLOCK))
    cache = torch.empty(2, num_blocks, BLOCK, kv_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda").normal_()
    q = torch.randn(prompt.seqs * prompt.new, prompt.heads, HEAD_DIM, device="cuda").to(torch.bfloat16)
    batches = batches_over(
        prompt, num_blocks, num_input_sets(prompt.seqs * prompt.length * kv_heads * 512.0, at_most=16)
    )

    def call(batch: AttentionBatch) -> Tensor:
        return kernels.mha_attention(q, cache, batch, HEAD_DIM**-0.5, window)

    def check() -> float:
        out = call(batches[0]).view(prompt.seqs, prompt.new, prompt.heads, HEAD_DIM)
        blocks = batches[0].block_table[-1].long()
        queries = q.view(prompt.seqs, prompt.new, prompt.heads, HEAD_DIM)[-1].float()
        error = 0.0
        for head in (0, prompt.heads - 1):
            kv_head = head * kv_heads // prompt.heads
            keys, values = (plane[blocks, :, kv_head].flatten(0, 1)[: prompt.length].float() for plane in cache)
            expected = attend(queries[:, head], keys, values, HEAD_DIM**-0.5, window)
            error = max(error, relative_error(out[-1, :, head], expected, MHA_ERROR))
        return error

    return Prepared(calls=[functools.partial(call, batch) for batch in batches], check=check)
