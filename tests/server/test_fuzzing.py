"""Requests made from the endpoint's description: no 5xx, no lost connection, nothing left behind."""

import pytest

from kimi_openai import EndpointSettings
from support.endpoint_fuzz import fuzz
from support.openai_endpoint import running_endpoint
from support.server_process import assert_everything_is_free


@pytest.mark.parametrize(
    ("num_cases", "seed"), [(160, 0), *(pytest.param(2_500, seed, marks=pytest.mark.soak) for seed in (1, 2, 3, 4))]
)
def test_generated_requests(server, url, num_cases, seed):
    with running_endpoint(EndpointSettings(url=url)) as endpoint:
        statuses = fuzz(endpoint.base_url.removesuffix("/v1"), num_cases, seed)
        assert endpoint.send("GET", "/health")[0] == 200
    assert statuses.total() >= 0.95 * num_cases, statuses
    assert statuses[200] > 0.05 * num_cases, statuses
    assert_everything_is_free(server)
