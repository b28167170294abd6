"""Decode and verify over paged latents at Kimi-K2's widths: 512 + 64, blocks of 64."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernel_cases import Case, Prepared, num_input_sets, relative_error
from kimi_kernels import AttentionBatch, KernelSet

LORA_RANK, ROPE_DIM, BLOCK = 512, 64, 64
LATENT_DIM = LORA_RANK + ROPE_DIM
SCALE = 192**-0.5
ERROR_LIMIT = 8e-3
"""bf16 weights and latents: 2^-9 each, relative to results that average over many keys."""
POOL_BLOCKS = 128 * 32768 // BLOCK
FP8_SCALE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    seqs: int
    context: int
    rows: int
    heads: int
    fp8: bool = False
    uneven: bool = False

    @property
    def lengths(self) -> list[int]:
        if not self.uneven:
            return [self.context] * self.seqs
        generator = torch.Generator().manual_seed(7)
        return torch.randint(self.rows, 2 * self.context + 1, (self.seqs,), generator=generator).tolist()

    @property
    def num_bytes(self) -> float:
        latents = sum(self.lengths) * LATENT_DIM * (1 if self.fp8 else 2)
        return latents + self.seqs * self.rows * self.heads * (LATENT_DIM + LORA_RANK) * 2

    @property
    def num_flops(self) -> float:
        return 2.0 * self.heads * self.rows * sum(self.lengths) * (LATENT_DIM + LORA_RANK)

    @property
    def name(self) -> str:
        context = f"1..{2 * self.context // 1024}k" if self.uneven else f"{self.context // 1024}k"
        return f"{self.seqs}x{context} q{self.rows} h{self.heads}{' fp8' if self.fp8 else ''}"


def cases(kernels: KernelSet) -> list[Case]:
    rows: list[tuple[Shape, float | None, float | None, str]] = []
    for heads in (8, 16):
        for seqs, context in ((64, 8192), (128, 4096), (128, 32768)):
            for num_rows in (1, 2, 4) if context == 8192 else (1, 4):
                peer = (
                    {(64, 1): "FlashMLA 211", (64, 4): "FlashMLA 215"}.get((seqs, num_rows), "") if heads == 8 else ""
                )
                rows.append((Shape(seqs=seqs, context=context, rows=num_rows, heads=heads), None, 1.18, peer))
    rows += [
        (Shape(seqs=64, context=8192, rows=8, heads=8), None, 1.35, "FlashInfer 223"),
        (Shape(seqs=16, context=8192, rows=1, heads=8), None, None, "FlashMLA 62"),
        (Shape(seqs=16, context=8192, rows=4, heads=8), 72, None, "FlashMLA 63"),
        (Shape(seqs=4, context=8192, rows=4, heads=8), None, None, "FlashMLA 28"),
        (Shape(seqs=1, context=8192, rows=4, heads=8), 34, None, "FA3 21"),
        (Shape(seqs=1, context=8192, rows=1, heads=8), None, None, "FA3 18"),
        (Shape(seqs=1, context=1024, rows=4, heads=8), 14, None, "FlashMLA 12"),
        (Shape(seqs=1, context=1024, rows=1, heads=8), 14, None, "FlashMLA 11"),
        (Shape(seqs=1, context=131072, rows=4, heads=8), None, None, "FA3 78"),
        (Shape(seqs=64, context=8192, rows=1, heads=32), None, None, ""),
        (Shape(seqs=64, context=8192, rows=4, heads=32), None, None, ""),
        (Shape(seqs=16, context=8192, rows=4, heads=32), None, None, ""),
        (Shape(seqs=1, context=8192, rows=4, heads=32), None, None, ""),
        (Shape(seqs=64, context=8192, rows=4, heads=32, fp8=True), None, None, ""),
        (Shape(seqs=64, context=8192, rows=1, heads=64), None, None, "FlashInfer 225"),
        (Shape(seqs=64, context=8192, rows=4, heads=64), 800, None, "FlashMLA 425"),
        (Shape(seqs=64, context=8192, rows=8, heads=64), None, None, "FlashMLA 805"),
        (Shape(seqs=1, context=8192, rows=4, heads=64), None, None, "FlashMLA 26"),
        (Shape(seqs=1, context=1024, rows=1, heads=64), None, None, "FlashMLA 13"),
        (Shape(seqs=1, context=1024, rows=4, heads=64), None, None, "FlashMLA 16"),
        (Shape(seqs=16, context=1024, rows=1, heads=64), None, None, ""),
        (Shape(seqs=16, context=1024, rows=4, heads=64), None, None, ""),
        (Shape(seqs=64, context=1024, rows=1, heads=64), None, None, ""),
        (Shape(seqs=64, context=1024, rows=4, heads=64), None, None, ""),
        (Shape(seqs=64, context=8192, rows=1, heads=128), None, None, ""),
        (Shape(seqs=64, context=8192, rows=1, heads=8, fp8=True), None, None, "FlashMLA-fp8 123"),
        (Shape(seqs=64, context=8192, rows=4, heads=8, fp8=True), 175, None, "FlashMLA-fp8 127"),
        (Shape(seqs=64, context=8192, rows=4, heads=16, fp8=True), None, None, "FlashMLA-fp8 134"),
        (Shape(seqs=64, context=8192, rows=4, heads=8, uneven=True), None, 1.35, ""),
        (Shape(seqs=64, context=8192, rows=4, heads=64, uneven=True), None, None, ""),
    ]
    return [
        Case(
            op="mla_decode",
            name=shape.name,
            num_bytes=shape.num_bytes,
            num_flops=shape.num_flops,
            prepare=functools.partial(prepare, kernels, shape),
            limit_us=limit_us,
            limit_of_floor=limit_of_floor,
            peer=peer,
        )
        for shape, limit_us, limit_of_floor, peer in rows
    ]


@functools.lru_cache(maxsize=1)
def latent_pool(fp8: bool) -> Tensor:
    """Random latents, enough for the largest case; every case draws its blocks from it at random."""
    pool = torch.empty(POOL_BLOCKS, BLOCK, LATENT_DIM, dtype=torch.bfloat16, device="cuda").normal_()
    return (pool / FP8_SCALE).clamp_(-448, 448).to(torch.float8_e4m3fn) if fp8 else pool


def prepare(kernels: KernelSet, shape: Shape) -> Prepared:
    pool = latent_pool(shape.fp8)
    lengths = shape.lengths
    max_blocks = -(-max(lengths) // BLOCK)
    num_tokens = shape.seqs * shape.rows
    q = torch.randn(num_tokens, shape.heads, LATENT_DIM, device="cuda").to(torch.bfloat16)
    batches = []
    for _ in range(num_input_sets(shape.num_bytes)):
        blocks = torch.randperm(POOL_BLOCKS, device="cuda")[: shape.seqs * max_blocks]
        if blocks.numel() < shape.seqs * max_blocks:
            blocks = torch.randint(POOL_BLOCKS, (shape.seqs * max_blocks,), device="cuda")
        batch = AttentionBatch(
            cu_seqlens_q=torch.arange(shape.seqs + 1, dtype=torch.int32, device="cuda") * shape.rows,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            block_table=blocks.view(shape.seqs, max_blocks).to(torch.int32),
            num_tokens=num_tokens,
            max_query_len=shape.rows,
            max_seq_len=max(lengths),
        )
        batches.append(replace(batch, decode_plan=kernels.plan_mla_decode(batch, shape.heads, BLOCK)))
    kv_scale = FP8_SCALE if shape.fp8 else 1.0

    def call(batch: AttentionBatch) -> Tensor:
        return kernels.mla_decode(q, pool, batch, LORA_RANK, SCALE, kv_scale)[0]

    def check() -> float:
        out = call(batches[0]).view(shape.seqs, shape.rows, shape.heads, LORA_RANK)
        return max(
            relative_error(out[seq], expected(q, pool, batches[0], seq, shape, kv_scale), ERROR_LIMIT)
            for seq in range(0, shape.seqs, max(1, shape.seqs // 16))
        )

    return Prepared(calls=[functools.partial(call, batch) for batch in batches], check=check)


def expected(q: Tensor, pool: Tensor, batch: AttentionBatch, seq: int, shape: Shape, kv_scale: float) -> Tensor:
    """Attention of one sequence in float32: [rows, heads, LORA_RANK]."""
    length = shape.lengths[seq]
    latents = pool[batch.block_table[seq].long()].flatten(0, 1)[:length].float() * kv_scale
    queries = q.view(shape.seqs, shape.rows, shape.heads, LATENT_DIM)[seq].float()
    scores = torch.einsum("qhd,kd->qhk", queries, latents) * SCALE
    key = torch.arange(length, device=q.device)
    last = length - shape.rows + torch.arange(shape.rows, device=q.device)
    scores.masked_fill_(key[None, None, :] > last[:, None, None], -torch.inf)
    return torch.einsum("qhk,kd->qhd", scores.softmax(-1), latents[:, :LORA_RANK])
