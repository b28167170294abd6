"""Every way a checkpoint can be broken is named in one message, without a traceback, with exit code 2."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.checkpoint.safetensors_source import INDEX_FILE, SINGLE_FILE
from kimi_backend.cli import main
from kimi_backend.config.quantization_config import QuantizationMethod
from support.checkpoint_breaks import (
    Break,
    add,
    both_quantizations,
    draft_field,
    draft_weights,
    drop_quantization,
    index,
    overwrite,
    put,
    remove,
    replace_by_file,
    replace_by_folder,
    sharded,
    spoil,
    swap,
    text_field,
    truncate,
    weights,
)
from support.checkpoint_folders import PREFIX, Tensors, copy_folder, edit_json, edit_weights, make_tiny

LAYER = f"{PREFIX}model.layers.1."
EXPERT = f"{LAYER}mlp.experts.3.down_proj."
ATTENTION = f"{PREFIX}model.layers.0.self_attn."


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An unbroken pair of each kind."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        "int4": make_tiny(folder / "int4", QuantizationMethod.INT4, DraftKind.MHA),
        "fp8": make_tiny(folder / "fp8", QuantizationMethod.FP8, DraftKind.MLA31),
        "mxfp4": make_tiny(folder / "mxfp4", QuantizationMethod.MXFP4, DraftKind.MLA),
    }


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["kimi", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    code = caught.value.code
    return code if isinstance(code, int) else 0


def inspect_broken(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of `kimi inspect`."""
    assert run(["inspect", str(folder), "--draft", str(folder / "draft")], monkeypatch) == main.EXIT_BAD_INPUT
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    assert output.err.startswith("error: ")
    assert output.out == ""
    return output.err


SHARD = "model-00002-of-00003.safetensors"

FILES: dict[str, tuple[Break, str]] = {
    "weights truncated": (truncate(SINGLE_FILE, 7), r"model\.safetensors: cannot be read as safetensors"),
    "header truncated": (overwrite(SINGLE_FILE, b"\x40\0\0\0\0\0\0\0{"), r"model\.safetensors: cannot be read"),
    "weights empty": (overwrite(SINGLE_FILE, b""), r"model\.safetensors: cannot be read as safetensors"),
    "weights of another format": (overwrite(SINGLE_FILE, b"PK\x03\x04" * 99), r"model\.safetensors: cannot be read"),
    "header is not JSON": (
        overwrite(SINGLE_FILE, b"\x08\0\0\0\0\0\0\0notjson!"),
        r"model\.safetensors: cannot be read",
    ),
    "header far too long": (overwrite(SINGLE_FILE, b"\xff" * 64), r"model\.safetensors: cannot be read"),
    "weights are a folder": (replace_by_folder(SINGLE_FILE), r"model\.safetensors is no file"),
    "shard truncated": (sharded(truncate(SHARD, 1)), rf"{SHARD}: cannot be read as safetensors"),
    "shard absent": (sharded(lambda folder: (folder / SHARD).unlink()), rf"{SHARD} is listed in .* but absent"),
    "shard absent, no index": (
        sharded(lambda folder: (folder / SHARD).unlink(), with_index=False),
        "2 shards found, expected 3 as their names say",
    ),
    "shards of two sets": (
        sharded(lambda folder: (folder / SHARD).rename(folder / "model-00002-of-00009.safetensors"), with_index=False),
        r"shards of different sets found \(of \[3, 9\]\)",
    ),
    "tensor in two shards": (
        sharded(
            lambda folder: shutil.copy(folder / SHARD, folder / "model-00003-of-00003.safetensors"), with_index=False
        ),
        "is in both model-00002-of-00003.safetensors and model-00003-of-00003.safetensors",
    ),
    "index not JSON": (sharded(overwrite(INDEX_FILE, b"{")), "index.json: expected JSON with an object weight_map"),
    "index a list": (sharded(overwrite(INDEX_FILE, b"[]")), "index.json: expected JSON with an object weight_map"),
    "index without weight_map": (index(lambda content: content.pop("weight_map")), "expected JSON with an object wei"),
    "index names another shard": (
        index(lambda content: content["weight_map"].update({"language_model.lm_head.weight": SHARD})),
        rf"tensor 'language_model\.lm_head\.weight' is listed in {SHARD}, found in model-00001",
    ),
    "index names an unknown tensor": (
        index(lambda content: content["weight_map"].update({"extra": SHARD})),
        rf"tensor 'extra' is listed in {SHARD}, found in no file",
    ),
    "index leaves the folder": (
        index(lambda content: content["weight_map"].update({"extra": "../secret.safetensors"})),
        r"weight_map holds '\.\./secret\.safetensors', expected file names without folders",
    ),
    "index holds numbers": (index(lambda content: content["weight_map"].update({"extra": 3})), "weight_map holds 3"),
    "folder absent": (lambda folder: shutil.rmtree(folder), "no such folder, expected a checkpoint folder"),
    "target is a file": (
        lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
        "is a file, expected a checkpoint folder",
    ),
    "config absent": (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
    "config not JSON": (overwrite("config.json", b"{,"), r"config\.json: not valid JSON"),
    "config a list": (overwrite("config.json", b"[]"), r"config\.json: holds a JSON list, expected an object"),
    "config not text": (overwrite("config.json", b"\xff\xfe\x00"), r"config\.json: not UTF-8"),
    "config a folder": (replace_by_folder("config.json"), r"config\.json: (no such file|cannot be read)"),
    "generation config broken": (overwrite("generation_config.json", b"nope"), r"generation_config\.json: not valid"),
    "draft absent": (
        lambda folder: shutil.rmtree(folder / "draft"),
        "draft: no such folder, expected a checkpoint folder",
    ),
    "draft is a file": (replace_by_file("draft"), "draft: is a file, expected a checkpoint folder"),
    "draft weights truncated": (truncate(f"draft/{SINGLE_FILE}", 100), r"draft: model\.safetensors: cannot be read"),
}

TARGET_TENSORS: dict[str, tuple[Break, str]] = {
    "norm missing": (weights(remove(f"{PREFIX}model.norm.weight")), r"model\.norm\.weight: missing, expected \[128\]"),
    "head missing": (weights(remove(f"{PREFIX}lm_head.weight")), r"lm_head\.weight: missing, expected \[2048, 128\]"),
    "scale missing": (weights(remove(f"{EXPERT}weight_scale")), r"experts\.3\.down_proj\.weight_scale: missing"),
    "codes missing": (weights(remove(f"{EXPERT}weight_packed")), r"experts\.3\.down_proj\.weight_packed: missing"),
    "router bias missing": (
        weights(remove(f"{LAYER}mlp.gate.e_score_correction_bias")),
        r"e_score_correction_bias: missing, expected \[16\] float32",
    ),
    "tensor unexpected": (
        weights(add(f"{ATTENTION}q_norm.weight", torch.ones(4))),
        r"self_attn\.q_norm\.weight: unexpected, found \[4\] float32; the config has no place for it",
    ),
    "layer unexpected": (
        weights(add(f"{PREFIX}model.layers.2.input_layernorm.weight", torch.ones(128))),
        r"model\.layers\.2\.input_layernorm\.weight: unexpected",
    ),
    "prefix misspelt": (
        lambda folder: edit_weights(
            folder,
            lambda tensors: tensors.update({n.replace("language", "lang"): tensors.pop(n) for n in list(tensors)}),
        ),
        r"lang_model\.model\.norm\.weight: unexpected",
    ),
    "shapes swapped": (
        weights(swap(f"{ATTENTION}q_a_proj.weight", f"{ATTENTION}q_b_proj.weight")),
        r"q_a_proj\.weight: expected shape \[64, 128\], found \[192, 64\]",
    ),
    "matrix transposed": (
        weights(put(f"{ATTENTION}q_a_proj.weight", lambda weight: weight.T)),
        r"q_a_proj\.weight: expected shape \[64, 128\], found \[128, 64\]",
    ),
    "codes misshapen": (
        weights(put(f"{EXPERT}weight_packed", lambda codes: codes[:, :-1])),
        r"weight_packed: expected shape \[128, 32\], found \[128, 31\]",
    ),
    "scale misshapen": (
        weights(put(f"{EXPERT}weight_scale", lambda scale: scale[:, :4])),
        r"weight_scale: expected shape \[128, 8\], found \[128, 4\]",
    ),
    "codes of another dtype": (
        weights(put(f"{EXPERT}weight_packed", lambda codes: codes.long())),
        r"weight_packed: expected int32, found int64",
    ),
    "weights are integers": (
        weights(put(f"{ATTENTION}o_proj.weight", lambda weight: weight.to(torch.int8))),
        r"o_proj\.weight: expected bfloat16 or float16 or float32, found int8",
    ),
    "weights are float64": (
        weights(put(f"{ATTENTION}o_proj.weight", lambda weight: weight.double())),
        r"o_proj\.weight: expected bfloat16 or float16 or float32, found float64",
    ),
    "int4 shape wrong": (
        weights(put(f"{EXPERT}weight_shape", lambda shape: shape.flip(0))),
        r"weight_shape: expected the values \[128, 256\], found \[256, 128\]",
    ),
    "scale NaN": (weights(spoil(f"{EXPERT}weight_scale", math.nan)), "weight_scale: expected finite values, found 1"),
    "scale infinite": (weights(spoil(f"{EXPERT}weight_scale", math.inf)), "weight_scale: expected finite values"),
    "scale negative": (
        weights(spoil(f"{EXPERT}weight_scale", -1.0)),
        "weight_scale: expected scales of at least 0, fou",
    ),
    "norm NaN": (weights(spoil(f"{PREFIX}model.norm.weight", math.nan)), r"norm\.weight: expected finite values"),
    "router bias infinite": (
        weights(spoil(f"{LAYER}mlp.gate.e_score_correction_bias", -math.inf)),
        "e_score_correction_bias: expected finite values",
    ),
    "config says more layers": (text_field("num_hidden_layers", 3), r"model\.layers\.2\.\S+: missing"),
    "config says fewer layers": (text_field("num_hidden_layers", 1), r"model\.layers\.1\.\S+: unexpected"),
    "config says another width": (
        text_field("hidden_size", 256),
        r"embed_tokens\.weight: expected shape \[2048, 256\]",
    ),
    "config says another vocabulary": (
        text_field("vocab_size", 4096),
        r"lm_head\.weight: expected shape \[4096, 128\]",
    ),
    "config says more experts": (text_field("n_routed_experts", 17), r"experts\.16\.\S+: missing"),
    "config says more heads": (text_field("num_attention_heads", 8), r"o_proj\.weight: expected shape \[128, 256\]"),
    "config says no shared expert": (text_field("n_shared_experts", 0), r"shared_experts\.\S+: unexpected"),
    "config says all layers dense": (
        text_field("first_k_dense_replace", 2),
        r"layers\.1\.mlp\.gate_proj\.weight: miss",
    ),
    "config says plain queries": (text_field("q_lora_rank", None), r"self_attn\.q_proj\.weight: missing"),
    "config says tied": (text_field("tie_word_embeddings", True), "tie_word_embeddings is True, expected False"),
    "config says not quantised": (drop_quantization, r"down_proj\.weight: missing(.|\n)*weight_packed: unexpected"),
    "config says nvfp4": (both_quantizations("quant_method", "nvfp4"), "quant_method is 'nvfp4', expected"),
    "config field junk": (text_field("kv_lora_rank", "64"), "kv_lora_rank is '64', expected an integer"),
    "config of another model": (text_field("model_type", "llama"), "model_type is 'llama', expected"),
    "end of sequence outside": (
        lambda folder: edit_json(folder / "config.json", lambda config: config.update(eos_token_id=5000)),
        "eos_token_id is 5000, expected integers from 0 to 2047",
    ),
}

OTHER_MASK = torch.arange(2048) < 512
DRAFT_TENSORS: dict[str, tuple[Break, str]] = {
    "d2t absent, t2d absent": (
        draft_weights(lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d"))),
        r"d2t: missing, expected \[512\] int64, since draft_vocab_size < vocab_size",
    ),
    "d2t of absolute ids": (
        draft_weights(lambda tensors: tensors.update({"d2t": tensors["d2t"] + torch.arange(512), "t2d": OTHER_MASK})),
        r"d2t: expected (target ids from 0 to 2047|rising)",
    ),
    "d2t not increasing": (
        draft_weights(put("d2t", lambda offsets: (offsets + torch.arange(512)).flip(0) - torch.arange(512))),
        "d2t: expected rising target ids, found",
    ),
    "d2t repeats a token": (
        draft_weights(lambda tensors: tensors["d2t"].__setitem__(5, tensors["d2t"][4] - 1)),
        r"d2t: expected rising target ids, found (\d+) then \1 for draft ids 4 and 5",
    ),
    "d2t negative": (draft_weights(put("d2t", lambda offsets: offsets - 4000)), "d2t: expected target ids from 0 to"),
    "d2t misshapen": (
        draft_weights(put("d2t", lambda offsets: offsets[:-1])),
        r"d2t: expected shape \[512\], found \[511\]",
    ),
    "d2t float": (
        draft_weights(put("d2t", lambda offsets: offsets.float())),
        "d2t: expected int64 or int32, found float32",
    ),
    "t2d too many": (
        draft_weights(put("t2d", lambda mask: torch.ones_like(mask))),
        "t2d: expected 512 target ids marked, found 2048",
    ),
    "t2d of other tokens": (
        draft_weights(put("t2d", lambda mask: mask.roll(1))),
        "t2d: expected the target ids of d2t, found id",
    ),
    "t2d misshapen": (
        draft_weights(put("t2d", lambda mask: mask[:-1])),
        r"t2d: expected shape \[2048\], found \[2047\]",
    ),
    "fc missing": (draft_weights(remove("fc.weight")), r"fc\.weight: missing, expected \[128, 384\]"),
    "fc of one state": (
        draft_weights(put("fc.weight", lambda weight: weight[:, :128])),
        r"fc\.weight: expected shape \[128, 384\], found \[128, 128\]",
    ),
    "reduced head missing": (
        draft_weights(remove("lm_head.weight")),
        r"lm_head\.weight: missing, expected \[512, 128\]",
    ),
    "input not doubled": (
        draft_weights(put("midlayer.self_attn.q_proj.weight", lambda weight: weight[:, :128])),
        r"layers\.0\.self_attn\.q_proj\.weight: expected shape \[128, 256\], found \[128, 128\]",
    ),
    "two names of one layer": (
        draft_weights(add("layers.0.hidden_norm.weight", torch.ones(128))),
        r"'layers\.0\.hidden_norm\.weight' and 'midlayer\.hidden_norm\.weight' are the same one",
    ),
    "second layer": (
        draft_weights(add("layers.1.hidden_norm.weight", torch.ones(128))),
        r"layers\.1\.hidden_norm\.weight: unexpected",
    ),
    "config says two layers": (draft_field("num_hidden_layers", 2), r"layers\.1\.mlp\.up_proj\.weight: missing"),
    "config says fc_norm": (draft_field("fc_norm", True), r"fc_norm\.0\.weight: missing, expected \[128\]"),
    "config says a larger draft vocabulary": (
        draft_field("draft_vocab_size", 600),
        r"lm_head\.weight: expected shape \[600",
    ),
    "config says another vocabulary": (
        draft_field("vocab_size", 1024),
        "vocab_size is 1024, expected 2048, the target's",
    ),
    "config says more heads": (draft_field("num_attention_heads", 8), r"q_proj\.weight: expected shape \[256, 256\]"),
    "config says an unknown draft": (
        draft_field("architectures", ["EagleLlama"]),
        r"architectures is \['EagleLlama'\]",
    ),
    "config says aux layers beyond the target": (
        draft_field("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}),
        r"layer_ids is \[1, 2, 9\], meaning",
    ),
    "config gives no aux layers for a shallow target": (
        draft_field("eagle_config", {}),
        "a target of 2 layers has no def",
    ),
    "config says another target width": (
        draft_field("target_hidden_size", 64),
        "target_hidden_size is 64, expected 128",
    ),
}

FP8_TENSORS: dict[str, tuple[Break, str]] = {
    "fp8 scale missing": (
        weights(remove(f"{EXPERT}weight_scale_inv")),
        r"experts\.3\.down_proj\.weight_scale_inv: missing, expected \[1, 2\] float32",
    ),
    "fp8 attention scale missing": (
        weights(remove(f"{ATTENTION}kv_b_proj.weight_scale_inv")),
        r"kv_b_proj\.weight_scale_inv: missing",
    ),
    "fp8 scale misshapen": (
        weights(put(f"{EXPERT}weight_scale_inv", lambda scale: scale.T)),
        r"weight_scale_inv: expected shape \[1, 2\], found \[2, 1\]",
    ),
    "fp8 scale NaN": (
        weights(spoil(f"{EXPERT}weight_scale_inv", math.nan)),
        "weight_scale_inv: expected finite values",
    ),
    "fp8 values stored as bf16": (
        weights(put(f"{EXPERT}weight", lambda values: values.float().bfloat16())),
        r"down_proj\.weight: expected float8_e4m3fn, found bfloat16",
    ),
    "fp8 values of the other format": (
        weights(put(f"{EXPERT}weight", lambda values: values.float().to(torch.float8_e5m2))),
        r"down_proj\.weight: expected float8_e4m3fn, found float8_e5m2",
    ),
    "config says other blocks": (
        both_quantizations("weight_block_size", [64, 64]),
        r"weight_scale_inv: expected shape \[2, 4\], found \[1, 2\]",
    ),
    "draft norm of 3.1 missing": (
        draft_weights(remove("fc_norm.1.weight")),
        r"fc_norm\.1\.weight: missing, expected \[128\]",
    ),
    "config hides 3.1 norms": (draft_field("fc_norm", False), r"fc_norm\.0\.weight: unexpected"),
    "draft norm NaN": (
        draft_weights(spoil("layers.0.hidden_norm.weight", math.nan)),
        "hidden_norm.weight: expected fin",
    ),
}

INT4_CASES = (
    FILES
    | {f"target: {k}": v for k, v in TARGET_TENSORS.items()}
    | {f"draft: {k}": v for k, v in DRAFT_TENSORS.items()}
)


MXFP4_TENSORS: dict[str, tuple[Break, str]] = {
    "mxfp4 scale missing": (
        weights(remove(f"{EXPERT}weight_scale")),
        r"experts\.3\.down_proj\.weight_scale: missing, expected \[128, 8\] uint8",
    ),
    "mxfp4 scale NaN": (
        weights(spoil(f"{EXPERT}weight_scale", 255)),
        "weight_scale: expected finite values, found 1 NaN",
    ),
    "mxfp4 scale beyond the kernels": (
        weights(spoil(f"{EXPERT}weight_scale", 130)),
        r"weight_scale: expected scales of at most 2, found 2 \*\* 3",
    ),
    "mxfp4 codes misshapen": (
        weights(put(f"{LAYER}mlp.shared_experts.up_proj.weight", lambda codes: codes[:, :32])),
        r"shared_experts\.up_proj\.weight: expected shape \[256, 64\], found \[256, 32\]",
    ),
}
BY_FORMAT = {"int4": INT4_CASES, "fp8": FP8_TENSORS, "mxfp4": MXFP4_TENSORS}
CASES = [(quantization, case) for quantization, cases in BY_FORMAT.items() for case in cases]


@pytest.mark.parametrize(("quantization", "case"), CASES)
def test_a_broken_checkpoint_is_named(
    whole: dict[str, Path],
    quantization: str,
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it, message = BY_FORMAT[quantization][case]
    folder = copy_folder(whole[quantization], tmp_path / "broken")
    break_it(folder)
    assert_named(inspect_broken(folder, monkeypatch, capsys), message)


def assert_named(found: str, message: str) -> None:
    assert re.search(message, found), f"{message!r} is not in {found!r}"


def test_everything_wrong_is_listed_at_once(
    whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_folder(whole["int4"], tmp_path / "broken")

    def edit(tensors: Tensors) -> None:
        del tensors[f"{PREFIX}model.norm.weight"]
        tensors[f"{PREFIX}extra"] = torch.ones(2)
        tensors[f"{EXPERT}weight_packed"] = torch.ones(2, 2)

    edit_weights(folder, edit)
    found = inspect_broken(folder, monkeypatch, capsys)
    for line in (
        "model.norm.weight: missing, expected [128] bfloat16 or float16 or float32",
        "extra: unexpected, found [2] float32",
        "weight_packed: expected shape [128, 32], found [2, 2]",
        "weight_packed: expected int32, found float32",
    ):
        assert line in found


def test_all_bad_values_are_listed_at_once(
    whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_folder(whole["int4"], tmp_path / "broken")
    weights(spoil(f"{EXPERT}weight_scale", math.nan))(folder)
    weights(spoil(f"{PREFIX}model.norm.weight", math.inf))(folder)
    found = inspect_broken(folder, monkeypatch, capsys)
    assert found.startswith(f"error: {folder}: ")
    assert "model.layers.1.mlp.experts.3.down_proj.weight_scale: expected finite" in found
    assert "model.norm.weight: expected finite" in found


@pytest.mark.parametrize("kind", ["int4", "fp8", "mxfp4"])
def test_an_unbroken_checkpoint_passes(
    whole: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = whole[kind]
    assert run(["inspect", str(folder), "--draft", str(folder / "draft"), "--json"], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["target"]["num_hidden_layers"] == 2
