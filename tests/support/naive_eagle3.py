"""An EAGLE3 draft in float64, one row at a time, from the formulas alone: no paging, no absorption, no batches.

Written from the papers (EAGLE-3: arXiv 2503.01840; DeepSeek-V2: arXiv 2405.04434; YaRN: arXiv 2309.00071) to judge the
real drafts, so it shares no code with them.
"""

import math

import torch

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.rope_config import RopeConfig
from support.tiny_checkpoints import Tensors

DraftConfig = Eagle3MlaDraftConfig | Eagle3MhaDraftConfig


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def rotate(x: torch.Tensor, position: int, rope: RopeConfig) -> torch.Tensor:
    """Each pair of one head's vector turned by its frequency; yarn slows pairs that turn seldom."""
    dim = len(x)
    out = x.clone()
    for pair in range(dim // 2):
        frequency = rope.theta ** (-2 * pair / dim)
        magnitude = 1.0
        if rope.is_yarn:
            length = rope.original_max_position_embeddings

            def boundary(turns: float, length: int = length) -> float:
                return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

            low = max(math.floor(boundary(rope.beta_fast)), 0)
            high = min(math.ceil(boundary(rope.beta_slow)), dim - 1)
            ramp = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
            frequency = frequency * (1 - ramp) + frequency / rope.factor * ramp
            if rope.mscale_all_dim:
                magnitude = (0.1 * rope.mscale * math.log(rope.factor) + 1) / (
                    0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
                )
            else:
                magnitude = 0.1 * math.log(rope.factor) + 1
        c, s = math.cos(position * frequency) * magnitude, math.sin(position * frequency) * magnitude
        first, second = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + dim // 2)
        out[first] = x[first] * c - x[second] * s
        out[second] = x[second] * c + x[first] * s
    return out


class NaiveDraft:
    """One sequence of a draft; `rows` holds what attention remembers of each row."""

    def __init__(self, config: DraftConfig, tensors: Tensors, layer: str = "layers.0.") -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        self.layer = layer
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def weight(self, name: str) -> torch.Tensor:
        return self.weights[f"{self.layer}{name}.weight"]

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """aux: [C * Ht] of one position."""
        aux = aux.double()
        if self.config.fc_norm:
            chunks = aux.split(self.config.target_hidden_size)
            aux = torch.cat(
                [
                    norm(chunk, self.weights[f"fc_norm.{i}.weight"], self.config.rms_norm_eps)
                    for i, chunk in enumerate(chunks)
                ]
            )
        return self.weights["fc.weight"] @ aux

    def row(self, hidden: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a row: (logits [draft_vocab_size], hidden to feed back [H])."""
        eps = self.config.rms_norm_eps
        embedding = norm(self.weights["embed_tokens.weight"][token], self.weight("input_layernorm"), eps)
        normed_hidden = norm(hidden, self.weight("hidden_norm"), eps)
        residual = normed_hidden if self.config.norm_before_residual else hidden
        z = torch.cat([embedding, normed_hidden])
        attended = self._mla(z) if isinstance(self.config, Eagle3MlaDraftConfig) else self._mha(z)
        r1 = residual + attended
        m = norm(r1, self.weight("post_attention_layernorm"), eps)
        gate, up = self.weight("mlp.gate_proj") @ m, self.weight("mlp.up_proj") @ m
        u = r1 + self.weight("mlp.down_proj") @ (silu(gate) * up)
        normed = norm(u, self.weights["norm.weight"], eps)
        return self.weights["lm_head.weight"] @ normed, normed if self.config.norm_output else u

    def _mla(self, z: torch.Tensor) -> torch.Tensor:
        config = self.config
        assert isinstance(config, Eagle3MlaDraftConfig)
        position, eps = len(self.rows), config.rms_norm_eps
        nope, rope_dim, heads = config.qk_nope_head_dim, config.qk_rope_head_dim, config.num_attention_heads
        if config.q_lora_rank is None:
            q = self.weight("self_attn.q_proj") @ z
        else:
            compressed = norm(self.weight("self_attn.q_a_proj") @ z, self.weight("self_attn.q_a_layernorm"), eps)
            q = self.weight("self_attn.q_b_proj") @ compressed
        kv_a = self.weight("self_attn.kv_a_proj_with_mqa") @ z
        latent = norm(kv_a[: config.kv_lora_rank], self.weight("self_attn.kv_a_layernorm"), eps)
        self.rows.append((latent, rotate(kv_a[config.kv_lora_rank :], position, config.rope)))
        expanded = [
            (self.weight("self_attn.kv_b_proj") @ latent).view(heads, nope + config.v_head_dim)
            for latent, _ in self.rows
        ]
        m = 1.0
        if config.rope.is_yarn and config.rope.mscale_all_dim:
            m = 0.1 * config.rope.mscale_all_dim * math.log(config.rope.factor) + 1
        scale = m * m / math.sqrt(nope + rope_dim)
        outputs = []
        for head, q_head in enumerate(q.view(heads, nope + rope_dim)):
            q_rotated = rotate(q_head[nope:], position, config.rope)
            scores = torch.stack(
                [
                    scale * (q_head[:nope] @ kv[head, :nope] + q_rotated @ key)
                    for kv, (_, key) in zip(expanded, self.rows, strict=True)
                ]
            )
            values = torch.stack([kv[head, nope:] for kv in expanded])
            outputs.append(torch.softmax(scores, 0) @ values)
        return self.weight("self_attn.o_proj") @ torch.cat(outputs)

    def _mha(self, z: torch.Tensor) -> torch.Tensor:
        config = self.config
        assert isinstance(config, Eagle3MhaDraftConfig)
        position, dim = len(self.rows), config.head_dim
        q = (self.weight("self_attn.q_proj") @ z).view(-1, dim)
        k = (self.weight("self_attn.k_proj") @ z).view(-1, dim)
        v = (self.weight("self_attn.v_proj") @ z).view(-1, dim)
        self.rows.append((torch.stack([rotate(head, position, config.rope) for head in k]), v))
        window = self.rows if config.sliding_window is None else self.rows[-config.sliding_window :]
        share = config.num_attention_heads // config.num_key_value_heads
        outputs = []
        for head, q_head in enumerate(q):
            rotated = rotate(q_head, position, config.rope)
            scores = torch.stack([keys[head // share] @ rotated for keys, _ in window]) / math.sqrt(dim)
            values = torch.stack([values[head // share] for _, values in window])
            outputs.append(torch.softmax(scores, 0) @ values)
        return self.weight("self_attn.o_proj") @ torch.cat(outputs)
