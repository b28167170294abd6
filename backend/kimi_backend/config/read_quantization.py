"""Reads a `quantization_config` of compressed-tensors, of AMD's quark, of NVIDIA's ModelOpt, or of DeepSeek's fp8."""

from collections.abc import Callable

import regex

from kimi_backend.config.json_fields import JsonFields
from kimi_backend.config.quantization_config import AS_IT_IS, QuantizationConfig, QuantizationMethod, StoredFormat
from kimi_backend.errors import ConfigError

DEFAULT_FP8_BLOCK_SIZE = 128
MXFP4_GROUP_SIZE = 32
NVFP4_TAKES = (
    "NVFP4 takes expert kernels whose products are 16 columns wide, with eight fp8 scales a step instead of four and a"
    " float32 factor a matrix; int4, fp8 and MXFP4 experts are served"
)


def read_quantization(fields: JsonFields | None) -> QuantizationConfig:
    """Read a `quantization_config`; None or {} means there is none.

    Raises:
        ConfigError: a method, layout or number that is not supported, by name.
    """
    if fields is None or not fields.data:
        return QuantizationConfig()
    method = fields.value("quant_method")
    if method in ("modelopt_fp4", "nvfp4"):
        raise fields.error("quant_method", f"'compressed-tensors', 'quark' or 'fp8' ({NVFP4_TAKES})")
    readers: dict[str, Callable[[JsonFields], QuantizationConfig]] = {
        "compressed-tensors": _read_compressed_tensors,
        "quark": _read_quark,
        "modelopt": _read_modelopt,
        "fp8": _read_fp8,
    }
    config = readers[fields.choice("quant_method", tuple(readers))](fields)
    for pattern in config.patterns():
        _check_pattern(pattern, fields.path)
    return config


def _read_compressed_tensors(fields: JsonFields) -> QuantizationConfig:
    formats = tuple(_GROUP_READERS)
    layout = fields.value("format")
    if layout == "nvfp4-pack-quantized":
        raise fields.error("format", f"{' or '.join(map(repr, formats))} ({NVFP4_TAKES})")
    layout = fields.choice("format", (*formats, "mixed-precision"))
    fields.require("quantization_status", "compressed")
    fields.require("kv_cache_scheme")
    groups = fields.object("config_groups")
    if groups is None or not groups.data or (len(groups.data) > 1 and layout != "mixed-precision"):
        raise fields.error("config_groups", "an object with exactly one group, or several of mixed-precision")
    stored: list[tuple[tuple[str, ...], StoredFormat]] = []
    for name in groups.data:
        stored.append(_read_group(_object(groups, name), None if layout == "mixed-precision" else layout))
    # A group of all linear layers comes last: it holds where no other does.
    stored.sort(key=lambda item: "Linear" in item[0])
    *others, (targets, default) = stored
    return QuantizationConfig(
        default=default,
        targets=targets,
        ignore=fields.strings("ignore"),
        special=tuple((pattern, own) for patterns, own in others for pattern in patterns),
    )


def _read_group(group: JsonFields, layout: str | None) -> tuple[tuple[str, ...], StoredFormat]:
    """Its targets and their format.

    Args:
        layout: that of the file; None leaves it to the group.
    """
    targets = group.strings("targets")
    if not targets:
        raise group.error("targets", "['Linear'], or the names of the routed experts")
    own = group.choice("format", tuple(_GROUP_READERS) if layout is None else (layout,), layout)
    group.require("output_activations")
    if own == "pack-quantized":
        group.require("input_activations")
    else:
        _check_activations(group, "input_activations", "dynamic", may_be_static=own == "float-quantized")
    weights = _object(group, "weights")
    weights.require("symmetric", True)
    # "static" and its newer name "weight" order the columns while they are rounded, and store them as they were.
    weights.require("actorder", "static", "weight", False, takes="columns in another order, with their index")
    weights.require("dynamic", False)
    return targets, _GROUP_READERS[own](weights)


def _read_int4_group(weights: JsonFields) -> StoredFormat:
    weights.choice("type", ("int",))
    weights.integer("num_bits", minimum=4, maximum=4)
    weights.choice("strategy", ("group",))
    group_size = weights.integer("group_size", minimum=8)
    if group_size % 8:
        raise weights.error("group_size", "a multiple of 8, the int4 values in a packed word")
    return StoredFormat(
        method=QuantizationMethod.INT4, group_size=group_size, values="weight_packed", scales="weight_scale"
    )


def _read_mxfp4_group(weights: JsonFields) -> StoredFormat:
    weights.choice("type", ("float",))
    weights.integer("num_bits", minimum=4, maximum=4)
    weights.choice("strategy", ("group",))
    weights.integer("group_size", minimum=MXFP4_GROUP_SIZE, maximum=MXFP4_GROUP_SIZE)
    return _mxfp4("weight_packed")


def _read_fp8_group(weights: JsonFields) -> StoredFormat:
    weights.choice("type", ("float",))
    weights.integer("num_bits", minimum=8, maximum=8)
    strategy = weights.choice("strategy", ("tensor", "channel", "block"))
    return _fp8_blocks(weights, "block_structure") if strategy == "block" else _fp8(one_scale=strategy == "tensor")


_GROUP_READERS: dict[str, Callable[[JsonFields], StoredFormat]] = {
    "pack-quantized": _read_int4_group,
    "mxfp4-pack-quantized": _read_mxfp4_group,
    "float-quantized": _read_fp8_group,
}


def _read_quark(fields: JsonFields) -> QuantizationConfig:
    for name in ("kv_cache_quant_config", "layer_type_quant_config", "softmax_quant_spec"):
        fields.require(name, {})
    export = fields.object("export")
    if export is not None:
        export.require("weight_format", "real_quantized", takes="float weights that are rounded at load")
        export.require("kv_cache_group", [])
        export.require("weight_merge_groups", [])
    default, own = fields.object("global_quant_config"), fields.object("layer_quant_config")
    special = () if own is None else tuple((name, _read_quark_layer(_object(own, name))) for name in own.data)
    return QuantizationConfig(
        default=_read_quark_layer(default) if default is not None and default.data else AS_IT_IS,
        ignore=fields.strings("exclude"),
        special=special,
    )


def _read_quark_layer(layer: JsonFields) -> StoredFormat:
    for name in ("output_tensors", "bias"):
        layer.require(name)
    weight = _object(layer, "weight")
    weight.require("is_dynamic", False)
    is_fp4 = weight.choice("dtype", ("fp4", "fp8_e4m3")) == "fp4"
    _check_activations(layer, "input_tensors", "is_dynamic", may_be_static=not is_fp4)
    if is_fp4:
        weight.choice("qscheme", ("per_group",))
        weight.integer("group_size", minimum=MXFP4_GROUP_SIZE, maximum=MXFP4_GROUP_SIZE)
        if weight.value("scale_format") != "e8m0":
            raise weight.error("scale_format", f"'e8m0' ({NVFP4_TAKES})")
        weight.require("ch_axis", -1, 1)
        return _mxfp4("weight")
    scheme = weight.choice("qscheme", ("per_tensor", "per_channel", "per_block"))
    if scheme == "per_block":
        return _fp8_blocks(weight, "block_size")
    if scheme == "per_channel":
        weight.require("ch_axis", 0)
    return _fp8(one_scale=scheme == "per_tensor")


def _read_modelopt(fields: JsonFields) -> QuantizationConfig:
    """One scale a matrix; `config_groups` says the same again, and scales of activations are left out."""
    if fields.value("quant_algo") != "FP8":
        raise fields.error("quant_algo", f"'FP8' ({NVFP4_TAKES})")
    for name in ("kv_cache_scheme", "kv_cache_quant_algo", "quantized_layers"):
        fields.require(name)
    fields.value("config_groups")
    ignored = (fields.strings(name) for name in ("ignore", "exclude_modules"))
    return QuantizationConfig(default=_fp8(one_scale=True), ignore=tuple(name for names in ignored for name in names))


def _check_activations(fields: JsonFields, name: str, dynamic: str, *, may_be_static: bool) -> None:
    """Activations stay in the compute dtype, which is finer; what a file fixes for them is not read.

    Args:
        may_be_static: the file may have scales for them, tensors that are left out.
    """
    value = fields.value(name)
    if value is None or (isinstance(value, dict) and (may_be_static or value.get(dynamic) in (True, "local"))):
        return
    raise fields.error(name, "null, or activations that are rounded as they come (static ones take their scales)")


def _read_fp8(fields: JsonFields) -> QuantizationConfig:
    fields.require("fmt", "e4m3", "float8_e4m3fn")
    fields.require("activation_scheme", "dynamic", "static")
    fields.require("scale_fmt", "float", "ue8m0")
    ignored = (fields.strings(name) for name in ("ignore", "modules_to_not_convert", "ignored_layers"))
    return QuantizationConfig(
        default=_read_fp8_format(fields),
        ignore=tuple(name for names in ignored for name in names),
    )


def _read_fp8_format(fields: JsonFields) -> StoredFormat:
    """Blocks of DeepSeek's size where nothing is said of them; null, or a static scheme, is one scale a matrix."""
    size = fields.value("weight_block_size")
    if size is None and ("weight_block_size" in fields.data or fields.value("activation_scheme") == "static"):
        return _fp8(one_scale=True)
    block_size = _block_size(fields, "weight_block_size")
    return StoredFormat(method=QuantizationMethod.FP8, block_size=block_size, scales="weight_scale_inv")


def _object(fields: JsonFields, name: str) -> JsonFields:
    found = fields.object(name)
    if found is None:
        raise fields.error(name, "an object")
    return found


def _mxfp4(values: str) -> StoredFormat:
    return StoredFormat(
        method=QuantizationMethod.MXFP4, group_size=MXFP4_GROUP_SIZE, values=values, scales="weight_scale"
    )


def _fp8(*, one_scale: bool) -> StoredFormat:
    return StoredFormat(method=QuantizationMethod.FP8, scales="weight_scale", has_one_scale=one_scale)


def _fp8_blocks(fields: JsonFields, name: str) -> StoredFormat:
    return StoredFormat(method=QuantizationMethod.FP8, block_size=_block_size(fields, name), scales="weight_scale")


def _block_size(fields: JsonFields, name: str) -> int:
    blocks = fields.integers(name, minimum=1) or (DEFAULT_FP8_BLOCK_SIZE, DEFAULT_FP8_BLOCK_SIZE)
    if len(blocks) != 2 or blocks[0] != blocks[1]:
        raise fields.error(name, "two equal positive integers, such as [128, 128]")
    return blocks[0]


def _check_pattern(pattern: str, path: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        regex.compile(pattern[3:])
    # Beside regex.error: too large a repetition count, too many nested groups.
    except (regex.error, OverflowError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{path}: targets or ignore holds {pattern[:100]!r}, expected a regular expression after 're:' ({error})"
        ) from error
