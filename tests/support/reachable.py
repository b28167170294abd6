"""Values that an object holds, however deep: how many, its tensors, and the memory behind them."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

CONTAINERS = (list, tuple, set, frozenset, deque)


def reachable(root: object, but_for: tuple[object, ...] = ()) -> Iterator[object]:
    """`root`, and the values in attributes, slots, dataclass fields and containers below it, each once."""
    seen = {id(value): value for value in but_for}
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that no other one gets its id
        yield value
        waiting += _children(value)


def reachable_tensors(root: object) -> Iterator[torch.Tensor]:
    """Those of them that are tensors."""
    return (value for value in reachable(root) if isinstance(value, torch.Tensor))


def storage_bytes(*roots: object) -> int:
    """Bytes behind all tensors of the roots; memory that several of them share counts once."""
    storages = {}
    for tensor in reachable_tensors(list(roots)):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def num_entries(root: object, but_for: tuple[object, ...] = ()) -> int:
    """Entries of all containers below `root`."""
    return sum(len(value) for value in reachable(root, but_for) if isinstance(value, (*CONTAINERS, Mapping)))


def _children(value: Any) -> list[object]:
    if isinstance(value, CONTAINERS):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if type(value).__module__.partition(".")[0] not in ("kimi_backend", "kimi_kernels"):
        return []
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names |= {field.name for field in dataclasses.fields(value)}
    children = [getattr(value, name) for name in names if hasattr(value, name)]
    return children + (list(vars(value).values()) if hasattr(value, "__dict__") else [])
