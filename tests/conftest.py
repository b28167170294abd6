"""Shared by every test: one thread a process, so that workers do not fight over cores and results repeat."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from support import scheduling

if not torch.cuda.is_available():
    # Triton-language decides at decoration, that is when a kernel's module is first imported, whether its interpreter
    # runs it. So this stands before every import of one, for all tests of a process. Tests that compile for real
    # (test_compile_gate.py) do it in a process of their own.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)

# A busy machine makes a slow example, not a wrong one.
settings.register_profile("slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole files go to a process, and what shares a server to one. xdist's own groups do not work with pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scheduling.scope_of(nodeid)

    config.option.loadscopereorder = False  # it would run files of many tests first, however short
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that collecting makes is garbage, and looking for it took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # in a process of xdist
        items.sort(key=lambda item: scheduling.turn_of(item.nodeid))
