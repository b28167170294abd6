"""The names and pages that the endpoint answers: on its socket, and header by header."""

import pytest
from starlette.datastructures import Headers

from kimi_openai import EndpointSettings
from kimi_openai.own_names import OwnNames
from support.openai_endpoint import running_endpoint

NAMES = ("api.example.com", "pages.example.com:3000")


@pytest.fixture(scope="module")
def endpoint():
    with running_endpoint(EndpointSettings(url="127.0.0.1:1", names=NAMES)) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/models", "/", "/health", "/nowhere"])
@pytest.mark.parametrize("headers", [{"Host": "evil.example:9000"}, {"Origin": "http://evil.example"}])
def test_every_path_is_closed_to_other_names(endpoint, path, headers):
    status, sent, body = endpoint.send("GET", path, headers=headers)
    assert status == 403
    assert b"not a name of this endpoint" in body
    assert "access-control-allow-origin" not in sent


def test_a_page_that_made_its_name_lead_here_runs_nothing(endpoint):
    """Host and Origin agree then."""
    headers = {"Host": f"evil.example:{endpoint.port}", "Origin": f"http://evil.example:{endpoint.port}"}
    assert endpoint.send("POST", "/v1/completions", {"prompt": "a"}, headers)[0] == 403


def test_its_own_page_and_listed_names_are_answered(endpoint):
    own = f"127.0.0.1:{endpoint.port}"
    for headers in ({}, {"Origin": f"http://{own}"}, {"Host": "api.example.com", "Origin": "https://api.example.com"}):
        assert endpoint.send("GET", "/v1/models", headers=headers)[0] == 200


@pytest.mark.parametrize(
    ("host", "origin", "is_answered"),
    [
        ("localhost:9000", None, True),
        ("LOCALHOST", None, True),
        ("[::1]:9000", None, True),
        ("192.168.1.5:9000", "http://192.168.1.5:9000", True),
        ("api.example.com:444", None, True),
        ("pages.example.com:3000", None, True),
        ("localhost:9000", "http://pages.example.com:3000", True),
        ("localhost:9000", "https://api.example.com", True),
        ("", None, True),
        ("pages.example.com", None, False),
        ("localhost:9000", "http://localhost:3000", False),
        ("localhost:9000", "http://pages.example.com", False),
        ("localhost:9000", "null", False),
        ("localhost:9000", "", False),
        ("localhost:9000", "file://localhost:9000", False),
        ("localhost.evil.example", None, False),
        ("evil.example@localhost", None, False),
        ("localhost@evil.example", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("[::1", None, False),
        ("evil.example#localhost", None, False),
    ],
)
def test_which_headers_are_its_own(host, origin, is_answered):
    pairs = [(b"host", host.encode())] if host else []
    pairs += [] if origin is None else [(b"origin", origin.encode())]
    problem = OwnNames(None, NAMES).problem_of(Headers(raw=pairs))
    assert (problem == "") == is_answered


def test_two_hosts_are_none():
    headers = Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")])
    assert OwnNames(None, NAMES).problem_of(headers)
