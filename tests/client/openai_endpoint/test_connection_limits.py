"""Clients that send slowly, nothing, too much or no more, or that read nothing: what they get, and that the others are
served meanwhile."""

import contextlib
import http.client
import logging
import resource
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_openai import EndpointSettings
from kimi_openai.connection_limits import FREE_BODY_BYTES, ConnectionLimits
from kimi_openai.log_limits import INTERVAL_S, LINES, RateLimit
from support.openai_endpoint import running_endpoint
from support.waiting import PATIENCE_S, wait_for

NOBODY = "localhost:1"
LIMITS = ConnectionLimits(
    max_connections=6, header_s=1.0, body_s=1.2, max_body_bytes=2**20, max_bytes_of_all_bodies=2**21
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"prompt": "a"}'
PATIENT_S = 10 * PATIENCE_S


@pytest.fixture(scope="module")
def endpoint():
    with running_endpoint(EndpointSettings(url=NOBODY, limits=LIMITS)) as running:
        yield running


@pytest.fixture
def patient():
    """An endpoint that waits longer for a request than any of these tests takes."""
    limits = replace(LIMITS, header_s=PATIENT_S, body_s=PATIENT_S)
    with running_endpoint(EndpointSettings(url=NOBODY, limits=limits)) as running:
        yield running


@contextlib.contextmanager
def connections(endpoint, count=1):
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S))
            for _ in range(count)
        ]


def read_all(connection):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def reply_of(connection):
    """Status and Retry-After; 599 for none."""
    reply = http.client.HTTPResponse(connection)
    with contextlib.suppress(ConnectionResetError, http.client.HTTPException):
        reply.begin()
        return reply.status, reply.getheader("Retry-After", "")
    return 599, ""


def is_served(endpoint):
    start = time.monotonic()
    return endpoint.send("GET", "/v1/models")[0] == 200 and time.monotonic() - start < PATIENCE_S


@pytest.mark.parametrize(
    ("sent", "status"), [(b"", b""), (HEAD, b"HTTP/1.1 408"), (HEAD + b"Content-Length: 9\r\n\r\n{", b"HTTP/1.1 408")]
)
def test_a_request_that_never_ends_is_ended(endpoint, sent, status):
    start = time.monotonic()
    with connections(endpoint) as (connection,):
        connection.sendall(sent)
        data = read_all(connection)
        assert data.startswith(status) and bool(data) == bool(status)
    assert time.monotonic() - start > 0.9 * LIMITS.header_s, "it had its time"


def test_more_bytes_win_no_time(endpoint):
    with connections(endpoint) as (connection,):
        start = time.monotonic()
        connection.sendall(HEAD)
        connection.settimeout(0.05)
        reply = b""
        while not reply and time.monotonic() - start < PATIENCE_S:
            connection.sendall(b"X")
            with contextlib.suppress(TimeoutError):
                reply = connection.recv(12)
        assert reply == b"HTTP/1.1 408"


def test_a_connection_that_waits_between_requests_is_closed(endpoint):
    with connections(endpoint) as (connection,):
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = read_all(connection)
    assert data.startswith(b"HTTP/1.1 200") and b"408" not in data


def test_the_one_that_waits_longest_makes_room(patient):
    with connections(patient, LIMITS.max_connections) as idle:
        assert is_served(patient)
        assert idle[0].recv(1) == b"", "the first was closed"
        idle[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            idle[-1].recv(1)


def test_where_all_are_busy_a_newcomer_is_told(patient):
    with connections(patient, LIMITS.max_connections) as busy:
        for connection in busy:  # it asks for the rest when it has read the head
            connection.sendall(HEAD + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")
            assert connection.recv(64) == b"HTTP/1.1 100 Continue\r\n\r\n"
        status, headers, body = patient.send("GET", "/v1/models")
        assert (status, headers["retry-after"]) == (503, "1")
        assert b"all connections are taken" in body
        for connection in busy:
            connection.sendall(b'{"a": "b"')
            assert connection.recv(12) == b"HTTP/1.1 400", "it was kept"
    wait_for(lambda: patient.send("GET", "/v1/models")[0] == 200)


def test_long_bodies_share_a_budget_that_short_ones_need_not(patient):
    size = LIMITS.max_body_bytes - 1
    with connections(patient, 4) as readers:
        for connection in readers:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size + b" " * (size - 1))
        assert patient.send("POST", "/v1/completions", b" " * (FREE_BODY_BYTES - 1))[0] == 400, "read, and no JSON"
        for connection in readers:
            connection.sendall(b" ")
        replies = sorted(map(reply_of, readers))
    assert [status for status, _ in replies[:2]] == [400, 400], "read, and no JSON"
    assert (503, "1") in replies[2:]
    assert patient.send("POST", "/v1/completions", b" " * size)[0] == 400, "what they had taken came back"


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
def test_a_body_that_is_too_long_gets_413_and_no_reset(patient, header):
    size = 40 * LIMITS.max_body_bytes
    with connections(patient) as (connection,):
        connection.sendall(HEAD + header + b"Content-Length: %d\r\n\r\n" % size)
        connection.sendall(b" " * size)
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_who_asks_before_sending_is_told_at_once(patient):
    with connections(patient) as (connection,):
        connection.sendall(HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (2 * LIMITS.max_body_bytes))
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_client_that_sends_no_more_gets_its_reply(patient):
    with connections(patient) as (connection,):
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        connection.shutdown(socket.SHUT_WR)
        data = read_all(connection)
    *interim, reply = data.split(b"HTTP/1.1 ")[1:]
    assert all(one == b"100 Continue\r\n\r\n" for one in interim)
    assert reply.startswith(b"503"), "nobody is behind the endpoint"


def has_kept(endpoint, connection):
    """Tell whether the endpoint's end of it is there."""
    ends = [f":{port:04X}" for port in (endpoint.port, connection.getsockname()[1])]
    rows = [line.split()[1:3] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(address[-5:] == ends[0] and peer[-5:] == ends[1] for address, peer in rows)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not Linux")
def test_who_reads_nothing_is_cut_off():
    limits = replace(LIMITS, header_s=PATIENT_S, body_s=PATIENT_S, unread_s=0.3)
    settings, count = EndpointSettings(url=NOBODY, limits=limits, model_names=("m" * 100_000,)), 200
    with running_endpoint(settings) as endpoint, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", endpoint.port))
        deaf.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * count)
        wait_for(lambda: not has_kept(endpoint, deaf), "the connection stays")
        assert read_all(deaf).count(b"HTTP/1.1 200") < count
        assert is_served(endpoint)


def test_no_more_connections_than_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        assert ConnectionLimits().within_descriptors().max_connections == 64
        assert replace(LIMITS, max_connections=3).within_descriptors().max_connections == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_lines_of_a_kind_are_held_to_a_rate():
    now = 0.0
    limit = RateLimit(lambda: now)

    def passes(message, *args):
        record = logging.LogRecord("uvicorn", logging.WARNING, "", 0, message, args, None)
        return record.getMessage() if limit.filter(record) else None

    lines = [passes("%s is no HTTP", number) for number in range(100)]
    assert lines == [f"{number} is no HTTP" for number in range(LINES)] + [None] * (100 - LINES)
    assert passes("another kind") == "another kind"
    now = INTERVAL_S
    assert passes("%s is no HTTP", 7) == f"7 is no HTTP (and {100 - LINES} more like it)"
    assert passes("%s is no HTTP", 8) == "8 is no HTTP"
