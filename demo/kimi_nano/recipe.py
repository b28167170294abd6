"""The sizes of the models and how long each stage of training takes."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from kimi_backend.checkpoint.presets import (
    Architecture,
    DraftKind,
    Json,
    Preset,
    draft_config_json,
    target_config_json,
)
from kimi_backend.config.aux_layers import AUX_LAYER_IDS_FIELD
from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod

NUM_RESERVED_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloopRecipe:
    """The way to keep the target from looping, see `unloop`."""

    peak_lr: float = 1.5e-3
    warmup_steps: int = 40
    plain_share: float = 0.33
    """First part of the stage, in which the target merely reads more of the corpus."""
    gram: int = 4
    """Tokens of a repeat; its last one is taken out."""
    weight: float = 1.0
    """The weight of the divergence on its own text beside the cross entropy."""
    window: int = 1024
    """Tokens of a window of the corpus, and of the longest prompt with what follows it: one shape to compile."""
    batch_tokens: int = 49152
    """The tokens of the corpus in a step, beside which stand as many of its own text."""
    shortest_prompt: int = 32
    """Lengths are drawn evenly up to the longest: prompts of one length teach not to loop at one place of a text."""
    own_tokens: int = 160
    own_sequences: int = 576
    """Written anew every `steps_a_pass` steps."""
    steps_a_pass: int = 24
    bias_step: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One size of everything. Widths are multiples of 32: int4 groups, tiles of the kernels."""

    text: Json
    """`text_config` fields of the target that differ from the tiny preset of `kimi make-checkpoint`."""
    yarn: Json
    draft: Json
    """Fields of the drafts' config.json that differ."""
    mha: Json
    """Further fields of the MHA draft."""
    window: int
    """Tokens of a training window until the last stage, which reads windows of the whole context."""
    batch_tokens: int
    draft_window: int
    draft_batch_tokens: int
    unroll: int = 4
    """Steps that a draft is unrolled over."""
    unroll_decay: float = 0.8
    """Weight of a step's loss relative to the step before."""
    coupled_share: float = 0.6
    """The share of the chance that coupled draws differ in the drafts' loss, beside the divergence."""
    coupled_from: float = 0.2
    """Progress from which on it counts."""
    peak_lr: float = 3e-3
    draft_peak_lr: float = 1e-2
    draft_warmup_steps: int = 20
    warmup_steps: int = 100
    quantized_share: float = 0.35
    """Last part of the target's training, in which experts are rounded to int4 in the forward pass."""
    long_share: float = 0.12
    """Last part of the target's training, on windows of the whole context."""
    bias_step: float = 1e-3
    """The step by which the router's correction bias moves towards even load."""
    generated_sequences: int = 8192
    generated_prompt_tokens: int = 128
    generated_tokens: int = 256
    generated_temperatures: tuple[float, ...] = (0.0, 1.0, 0.0, 0.6)
    """The temperatures of the sequences that the target writes for its drafts, and of their windows, in turn."""
    generated_share: float = 0.7
    """Share of the drafts' batches that the target wrote itself."""
    sharpen_prompts: int = 96
    """Windows of the training text that `sharpen` chooses a finished draft's scale on; 0 leaves drafts as trained."""
    unloop: UnloopRecipe = UnloopRecipe()
    num_layers: int = 8

    @property
    def context(self) -> int:
        return int(self.text["max_position_embeddings"])

    def own_temperature(self, place: int) -> float:
        """The temperature of the sequence or window at a place among those that the target wrote."""
        return self.generated_temperatures[place % len(self.generated_temperatures)]

    def target_json(self) -> Json:
        """The target's config.json, in the spelling of Kimi-K2.5."""
        first_special = int(self.text["vocab_size"]) - NUM_RESERVED_TOKENS
        token_ids = {
            "bos_token_id": first_special,
            "eos_token_id": first_special + 1,
            "pad_token_id": first_special + 255,
            "media_placeholder_token_id": first_special + 21,
        }
        config = target_config_json(
            Preset.TINY, self.num_layers, QuantizationMethod.INT4, Architecture.KIMI_K25, token_ids
        )
        config["text_config"] |= self.text
        config["text_config"]["rope_scaling"] |= self.yarn
        return config

    def target_config(self) -> KimiModelConfig:
        return KimiModelConfig.from_hf_json(self.target_json())

    def draft_json(self, kind: DraftKind) -> Json:
        """A draft's config.json. EAGLE3.1 counts its aux layers as outputs, the others as inputs: both are met."""
        config = draft_config_json(kind, Preset.TINY, self.num_layers)
        text = {name: self.text[name] for name in config if name in self.text}
        config = copy.deepcopy(config) | text | {"draft_vocab_size": self.text["vocab_size"]} | self.draft
        config["rope_scaling"] |= self.yarn
        if kind is DraftKind.MHA:
            config |= self.mha
        if kind is DraftKind.MLA31:
            ids = config["eagle_config"][AUX_LAYER_IDS_FIELD]
            config["eagle_config"][AUX_LAYER_IDS_FIELD] = [i - 1 for i in ids]
        return config

    def draft_config(self, kind: DraftKind) -> Eagle3MlaDraftConfig | Eagle3MhaDraftConfig:
        return Eagle3DraftConfig.from_hf_json(self.draft_json(kind), self.target_config())


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The end of a stage: after so many seconds, or after so many steps where that is given."""

    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The work of one `train` command."""

    recipe: Recipe
    target: Budget
    drafts: Budget
    unloop: Budget = Budget()
    """The stage's length; it is left out without seconds or steps."""
    seed: int = 0
    kinds: tuple[DraftKind, ...] = field(default=(DraftKind.MLA, DraftKind.MLA31, DraftKind.MHA))


NANO = Recipe(
    text={
        "hidden_size": 192,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
    },
    yarn={"factor": 4.0, "original_max_position_embeddings": 512},
    draft={"intermediate_size": 640},
    mha={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "draft_vocab_size": 2048},
    window=1024,
    batch_tokens=65536,
    draft_window=1024,
    draft_batch_tokens=32768,
)

NANO_DEEP = replace(
    NANO,
    text=NANO.text | {"n_routed_experts": 8, "num_experts_per_tok": 2},
    num_layers=20,
    peak_lr=2e-3,
    generated_sequences=14336,
    unloop=UnloopRecipe(peak_lr=1e-3, plain_share=0.0, batch_tokens=32768),
)
"""A target whose step outweighs its draft's and the calls, to be grown from a trained NANO: it has read the corpus, so
training against loops begins at once."""

MICRO = Recipe(
    text={
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 768,
        "max_position_embeddings": 128,
    },
    yarn={"factor": 2.0, "original_max_position_embeddings": 64},
    draft={"intermediate_size": 128},
    mha={"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "draft_vocab_size": 512},
    window=64,
    batch_tokens=1024,
    draft_window=64,
    draft_batch_tokens=1024,
    warmup_steps=5,
    peak_lr=1e-2,
    draft_peak_lr=2e-2,
    generated_sequences=8,
    generated_prompt_tokens=64,
    generated_tokens=64,
    sharpen_prompts=8,
    unloop=UnloopRecipe(
        window=64, batch_tokens=512, shortest_prompt=8, own_tokens=32, own_sequences=8, steps_a_pass=3, warmup_steps=2
    ),
)
"""Everything in small, for tests: seconds on a CPU."""

RECIPES: dict[str, Recipe] = {"nano": NANO, "nano-deep": NANO_DEEP, "micro": MICRO}


def sizes(config: KimiModelConfig | Eagle3DraftConfig) -> dict[str, Any]:
    """Fields of a config that a model card names."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
