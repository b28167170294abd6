"""An EAGLE3 draft in float64, one row at a time, from the formulas alone: no paging, no absorption, no batches.

Written from the papers (EAGLE-3: arXiv 2503.01840; DeepSeek-V2: arXiv 2405.04434; YaRN: arXiv 2309.00071) to judge the
real drafts, so it shares no code with them.
"""

import math

import torch

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.rope_config import RopeConfig, RopeType
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
        frequency = stretched(rope.theta ** (-2 * pair / dim), pair, dim, rope)
        magnitude = 1.0
        if rope.is_yarn:
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


def stretched(frequency: float, pair: int, dim: int, rope: RopeConfig) -> float:
    """A pair's frequency after the extension of the context, in radians a position."""
    length = rope.original_max_position_embeddings
    if rope.type is RopeType.DEFAULT:
        return frequency
    if rope.type is RopeType.LINEAR:
        return frequency / rope.factor
    if rope.type is RopeType.LLAMA3:
        turns = length * frequency / (2 * math.pi)
        if turns < rope.low_freq_factor:
            return frequency / rope.factor
        if turns > rope.high_freq_factor:
            return frequency
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return (1 - smooth) * frequency / rope.factor + smooth * frequency

    def boundary(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(boundary(rope.beta_fast)), 0)
    high = min(math.ceil(boundary(rope.beta_slow)), dim - 1)
    ramp = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
    return frequency * (1 - ramp) + frequency / rope.factor * ramp


class NaiveDraft:
    """One sequence of a draft; `rows` holds what each layer's attention remembers of each row."""

    def __init__(self, config: DraftConfig, tensors: Tensors, layer: str = "layers.0.") -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        self.layer = layer
        self.rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        normed = norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)
        return normed + self.weights.get(f"{name}.bias", 0.0)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0.0)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """aux: [C * Ht] of one position."""
        aux = aux.double()
        if self.config.fc_norm:
            chunks = aux.split(self.config.target_hidden_size)
            aux = torch.cat([self.norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)])
        if self.config.norm_before_fc:
            aux = self.norm("input_norm", aux)
        return self.linear("fc", aux)

    def row(self, hidden: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a row: (logits [draft_vocab_size], hidden to feed back [H])."""
        self.rows.append([])
        stream = hidden
        for index in range(self.config.num_hidden_layers):
            layer = self.layer if index == 0 else f"layers.{index}."
            if index == 0:
                embedding = self.norm(f"{layer}input_layernorm", self.weights["embed_tokens.weight"][token])
                normed_hidden = self.norm(f"{layer}hidden_norm", hidden)
                stream = normed_hidden if self.config.norm_before_residual else hidden
                z = torch.cat([embedding, normed_hidden])
            else:
                z = self.norm(f"{layer}input_layernorm", stream)
            is_mla = isinstance(self.config, Eagle3MlaDraftConfig)
            stream = stream + (self._mla(f"{layer}self_attn.", z) if is_mla else self._mha(f"{layer}self_attn.", z))
            m = self.norm(f"{layer}post_attention_layernorm", stream)
            gate, up = self.linear(f"{layer}mlp.gate_proj", m), self.linear(f"{layer}mlp.up_proj", m)
            stream = stream + self.linear(f"{layer}mlp.down_proj", silu(gate) * up)
        normed = self.norm("norm", stream)
        head = self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"])
        return head @ normed, normed if self.config.norm_output else stream

    def _remember(self, first: torch.Tensor, second: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This layer's rows so far, this one included."""
        self.rows[-1].append((first, second))
        layer = len(self.rows[-1]) - 1
        return [row[layer] for row in self.rows]

    def _mla(self, layer: str, z: torch.Tensor) -> torch.Tensor:
        config = self.config
        assert isinstance(config, Eagle3MlaDraftConfig)
        position = len(self.rows) - 1
        nope, rope_dim, heads = config.qk_nope_head_dim, config.qk_rope_head_dim, config.num_attention_heads
        if config.q_lora_rank is None:
            q = self.linear(f"{layer}q_proj", z)
        else:
            compressed = self.norm(f"{layer}q_a_layernorm", self.linear(f"{layer}q_a_proj", z))
            q = self.linear(f"{layer}q_b_proj", compressed)
        kv_a = self.linear(f"{layer}kv_a_proj_with_mqa", z)
        latent = self.norm(f"{layer}kv_a_layernorm", kv_a[: config.kv_lora_rank])
        rows = self._remember(latent, rotate(kv_a[config.kv_lora_rank :], position, config.rope))
        expanded = [
            self.linear(f"{layer}kv_b_proj", latent).view(heads, nope + config.v_head_dim) for latent, _ in rows
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
                    for kv, (_, key) in zip(expanded, rows, strict=True)
                ]
            )
            values = torch.stack([kv[head, nope:] for kv in expanded])
            outputs.append(torch.softmax(scores, 0) @ values)
        return self.linear(f"{layer}o_proj", torch.cat(outputs))

    def _mha(self, layer: str, z: torch.Tensor) -> torch.Tensor:
        config = self.config
        assert isinstance(config, Eagle3MhaDraftConfig)
        position, dim = len(self.rows) - 1, config.head_dim
        q, k, v = (self.linear(f"{layer}{name}_proj", z).view(-1, dim) for name in "qkv")
        rows = self._remember(torch.stack([rotate(head, position, config.rope) for head in k]), v)
        window = rows if config.sliding_window is None else rows[-config.sliding_window :]
        share = config.num_attention_heads // config.num_key_value_heads
        outputs = []
        for head, q_head in enumerate(q):
            rotated = rotate(q_head, position, config.rope)
            scores = torch.stack([keys[head // share] @ rotated for keys, _ in window]) / math.sqrt(dim)
            values = torch.stack([values[head // share] for _, values in window])
            outputs.append(torch.softmax(scores, 0) @ values)
        return self.linear(f"{layer}o_proj", torch.cat(outputs))
