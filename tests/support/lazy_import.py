"""Modules that take long to import, imported when they are first used: collecting all tests does without them."""

import importlib
import importlib.util
from typing import Any

import pytest


class LazyModule:
    """Has the attributes of the module of that name, which is imported for the first of them.

    It is not kept in `sys.modules`, where Hypothesis looks into every module.
    """

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks everything in a module whether it is a test or a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
