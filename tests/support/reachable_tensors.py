"""Every tensor that an object holds, however deep, and the memory behind them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def reachable_tensors(root: object) -> Iterator[torch.Tensor]:
    """Tensors in attributes, slots, dataclass fields, lists, tuples and dicts below `root`."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        else:
            waiting += _children(value)


def storage_bytes(*roots: object) -> int:
    """Bytes behind all tensors of the roots; memory that several of them share counts once."""
    storages = {}
    for tensor in reachable_tensors(list(roots)):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _children(value: Any) -> list[object]:
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if type(value).__module__.partition(".")[0] not in ("kimi_backend", "kimi_kernels"):
        return []
    children = list(vars(value).values()) if hasattr(value, "__dict__") else []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        children += [getattr(value, field.name) for field in dataclasses.fields(value)]
    return children
