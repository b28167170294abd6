"""Thousands of short requests: no process and no shared-memory region keeps growing."""

import asyncio

import pytest

from kimi_client.load import run_load
from support.server_process import regions, resident_bytes, stub_pids

CONCURRENCY = 32
MEASURED_FROM = 500
ALLOWED_GROWTH = 8 * 2**20


def run_requests(url, first, number):
    requests = [
        {"text_input": f"request {i}", "max_tokens": 3, "seed": i, "num_speculative_tokens": i % 4}
        for i in range(first, first + number)
    ]
    result = asyncio.run(run_load(url, requests, CONCURRENCY))
    assert not result.errors
    assert len(result.requests) == number


def measure(server):
    sizes = {name: resident_bytes(pid) for name, pid in stub_pids(server).items()}
    sizes["tritonserver"] = resident_bytes(server.process.pid)
    return sizes, regions(server)


@pytest.mark.parametrize("in_all", [2_000, pytest.param(40_000, marks=pytest.mark.soak)])
def test_nothing_grows_over_many_requests(server, url, in_all):
    run_requests(url, 0, MEASURED_FROM)
    before, regions_before = measure(server)
    assert set(before) == {"tritonserver", "kimi_target", "eagle3_draft", "spec_ensemble", "spec_ensemble_unary"}
    run_requests(url, MEASURED_FROM, in_all - MEASURED_FROM)
    after, regions_after = measure(server)
    assert regions_after == regions_before
    growth = {name: after[name] - before[name] for name in before}
    assert max(growth.values()) < ALLOWED_GROWTH, growth
