"""Requests made from the endpoint's description: no 5xx, no lost connection, nothing left behind."""

import pytest

from kimi_openai import EndpointSettings
from support.endpoint_fuzz import fuzz
from support.openai_endpoint import running_endpoint
from support.server_process import assert_everything_is_free


@pytest.mark.parametrize("num_cases", [160, pytest.param(10_000, marks=pytest.mark.soak)])
def test_generated_requests(server, url, num_cases):
    with running_endpoint(EndpointSettings(url=url)) as endpoint:
        statuses = fuzz(endpoint.base_url.removesuffix("/v1"), num_cases)
        assert endpoint.send("GET", "/health")[0] == 200
    assert statuses.total() >= 0.95 * num_cases, statuses
    assert statuses[200] > 0.05 * num_cases, statuses
    assert_everything_is_free(server)
