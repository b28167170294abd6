"""The places of a draft's fields in each layout of its config.json, and the meaning of those that are more than a
number."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kimi_backend.config.aux_layers import AUX_LAYER_IDS_FIELD, AuxLayers, resolve_aux_layers
from kimi_backend.config.json_fields import JsonFields
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationConfig, QuantizationMethod
from kimi_backend.config.read_quantization import read_quantization

MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
MHA_ARCHITECTURE = "LlamaForCausalLMEagle3"
_SPECULATORS_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")
_WINDOWED, _FULL = "sliding_attention", "full_attention"


class DraftAttention(Enum):
    """Kind of a draft's attention."""

    MLA = "multi-head latent attention"
    MHA = "multi-head or grouped-query attention"


_ARCHITECTURES = {
    MLA_ARCHITECTURE: DraftAttention.MLA,
    "Eagle3DeepseekV3ForCausalLM": DraftAttention.MLA,
    MHA_ARCHITECTURE: DraftAttention.MHA,
    "Eagle3LlamaForCausalLM": DraftAttention.MHA,
    **dict.fromkeys(_SPECULATORS_ARCHITECTURES, DraftAttention.MHA),
}


@dataclass(frozen=True, slots=True)
class DraftFields:
    """A draft's config.json. What describes the whole draft stands at the top, in `eagle_config`, or in both; what
    describes its layers at the top, or in the `transformer_layer_config` of the speculators library."""

    top: JsonFields
    attention: DraftAttention
    layer: JsonFields
    """Holds the sizes of the layers."""
    eagle: JsonFields | None
    is_speculators: bool

    @classmethod
    def of(cls, top: JsonFields) -> "DraftFields":
        """
        Raises:
            ConfigError: the architecture is not that of an EAGLE3 draft.
        """
        names = top.strings("architectures")
        if len(names) != 1 or names[0] not in _ARCHITECTURES:
            raise top.error("architectures", " or ".join(repr([name]) for name in _ARCHITECTURES))
        is_speculators = names[0] in _SPECULATORS_ARCHITECTURES
        layer = top.object("transformer_layer_config") if is_speculators else top
        if layer is None:
            raise top.error("transformer_layer_config", "an object")
        top.require("speculators_model_type", "eagle3")
        return cls(top, _ARCHITECTURES[names[0]], layer, top.object("eagle_config"), is_speculators)

    def holding(self, field: str) -> JsonFields:
        """The object that says `field`; where several do, they must agree."""
        holders = list(self._holders(field))
        values = [holder.value(field) for holder in holders]
        if any(value is not values[-1] and value != values[-1] for value in values):  # NaN is not itself
            raise holders[0].error(field, f"{values[-1]!r} as at the top level, or only one of the two")
        return holders[0] if holders else self.top

    def boolean(self, field: str, default: bool) -> bool:
        return self.holding(field).boolean(field, default)

    def _holders(self, field: str) -> Iterator[JsonFields]:
        if self.eagle is not None and self.eagle.has(field):
            yield self.eagle
        if self.top.has(field):
            yield self.top

    def fc_norm(self) -> bool:
        """`fc_norm`, once called `use_aux_norm`."""
        legacy = self.boolean("use_aux_norm", False)
        fc_norm = self.boolean("fc_norm", legacy)
        if fc_norm != legacy and self.holding("use_aux_norm").has("use_aux_norm"):
            raise self.holding("fc_norm").error(
                "fc_norm", f"{legacy} as its older name use_aux_norm, or only one of the two"
            )
        return fc_norm

    def norm_before_residual(self) -> bool:
        if self.is_speculators and not self.top.has("norm_before_residual"):
            self.top.warn("norm_before_residual is missing; true is taken, as vLLM does for this layout")
            return True
        return self.boolean("norm_before_residual", False)

    def aux_layers(self, target: KimiModelConfig, override: tuple[int, ...] | None) -> AuxLayers:
        layers = resolve_aux_layers(self.holding(AUX_LAYER_IDS_FIELD), target.num_hidden_layers, override)
        counted, num_layers = self.holding("num_aux_hidden_states"), len(layers.ids)
        if counted.integer("num_aux_hidden_states", num_layers) != num_layers:
            raise counted.error("num_aux_hidden_states", f"{num_layers}, the number of aux layers {list(layers.ids)}")
        return layers

    def target_hidden_size(self, target: KimiModelConfig) -> int:
        """Width of one aux chunk: the draft's own unless `target_hidden_size` says another."""
        holding, field = self.holding("target_hidden_size"), "target_hidden_size"
        if not holding.has(field):
            holding, field = self.layer, "hidden_size"
        value = holding.integer(field)
        if value != target.hidden_size:
            hint = "" if field == "target_hidden_size" else "; a draft of another width says target_hidden_size"
            raise holding.error(field, f"{target.hidden_size}, the target's hidden_size{hint}")
        return value

    def quantization(self) -> QuantizationConfig:
        """Read that of the linear layers, which are dequantised as they are loaded."""
        fields = self.top.object("quantization_config")
        quantization = read_quantization(fields)
        if any(stored.method is QuantizationMethod.INT4 for stored in quantization.formats):
            raise self.top.error("quantization_config", "none, fp8 or mxfp4 (int4 takes its unpacking at load)")
        return quantization

    def sliding_window(self, num_layers: int) -> int | None:
        """Keys that a row sees, up to its own; None where it sees all.

        Raises:
            ConfigError: some of the layers have a window and others have none.
        """
        fields = self.layer
        size = fields.value("sliding_window")
        if isinstance(size, bool) or size not in (None, -1, 0):
            size = fields.integer("sliding_window")
        # Qwen's configs count the window's layers from `max_window_layers` on, and default to no window.
        uses_window = fields.boolean("use_sliding_window", not str(fields.value("model_type")).startswith("qwen"))
        first = fields.integer("max_window_layers", 0, minimum=0) if fields.has("use_sliding_window") else 0
        kinds = [_WINDOWED if layer >= first else _FULL for layer in range(num_layers)]
        if fields.has("layer_types"):
            kinds = list(fields.strings("layer_types"))[:num_layers]
            if len(kinds) < num_layers or set(kinds) - {_WINDOWED, _FULL}:
                raise fields.error("layer_types", f"{_FULL!r} or {_WINDOWED!r} for each layer")
        fields.value("max_window_layers")
        if size in (None, -1, 0) or not uses_window or set(kinds) == {_FULL}:
            return None
        if set(kinds) != {_WINDOWED}:
            raise fields.error("sliding_window", "a window of all layers or of none")
        return int(size)
