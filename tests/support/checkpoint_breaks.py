"""Ways to break a checkpoint's folder: in its tensors, its configs, its files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kimi_backend.checkpoint.safetensors_source import INDEX_FILE
from support.checkpoint_folders import Tensors, edit_json, edit_weights, shard

Break = Callable[[Path], object]
"""Changes the folder that it is given; the draft lies in its folder `draft`."""


def weights(edit: Callable[[Tensors], object]) -> Break:
    return lambda folder: edit_weights(folder, edit)  # type: ignore[arg-type]


def draft_weights(edit: Callable[[Tensors], object]) -> Break:
    return lambda folder: edit_weights(folder / "draft", edit)  # type: ignore[arg-type]


def remove(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def add(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def swap(a: str, b: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({a: tensors[b], b: tensors[a]})


def spoil(name: str, value: float) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        tensors[name].flatten()[1] = value

    return edit


def text_field(name: str, value: Any) -> Break:
    return lambda folder: edit_json(folder / "config.json", lambda config: config["text_config"].update({name: value}))


def draft_field(name: str, value: Any) -> Break:
    return lambda folder: edit_json(folder / "draft" / "config.json", lambda config: config.update({name: value}))


def truncate(file: str, num_bytes: int) -> Break:
    def cut(folder: Path) -> None:
        path = folder / file
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return cut


def overwrite(file: str, content: bytes) -> Break:
    return lambda folder: (folder / file).write_bytes(content)


def sharded(change: Break, *, with_index: bool = True) -> Break:
    def edit(folder: Path) -> None:
        shard(folder, with_index=with_index)
        change(folder)

    return edit


def index(edit: Callable[[dict[str, Any]], object]) -> Break:
    return sharded(lambda folder: edit_json(folder / INDEX_FILE, edit))  # type: ignore[arg-type]


def replace_by_file(name: str) -> Break:
    def edit(folder: Path) -> None:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
        (folder / name).write_text("not a folder")

    return edit


def replace_by_folder(name: str) -> Break:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return edit


def drop_quantization(folder: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        del config["quantization_config"], config["text_config"]["quantization_config"]

    edit_json(folder / "config.json", edit)


def both_quantizations(field: str, value: Any) -> Break:
    def edit(config: dict[str, Any]) -> None:
        for holder in (config, config["text_config"]):
            holder["quantization_config"][field] = value

    return lambda folder: edit_json(folder / "config.json", edit)
