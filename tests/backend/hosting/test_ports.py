import socket

import pytest

from kimi_backend.errors import ConfigError
from kimi_backend.hosting import embedded_server
from kimi_backend.hosting.embedded_server import free_port
from kimi_backend.hosting.ports import check_host, check_ports


def test_no_port_is_given_twice(monkeypatch):
    """The kernel may choose one again that nobody listens on yet."""
    chosen = iter([7001, 7001, 7002])

    class Probe(socket.socket):
        def bind(self, address):
            """Nothing."""

        def getsockname(self):
            return "127.0.0.1", next(chosen)

    monkeypatch.setattr(embedded_server.socket, "socket", Probe)
    assert [free_port(), free_port()] == [7001, 7002]


def test_free_ports_pass():
    check_ports({"http": free_port(), "gRPC": free_port()})


@pytest.mark.parametrize("port", [-1, 0, 65_536, 99_999])
def test_what_is_no_port_is_refused(port):
    with pytest.raises(ConfigError, match=rf"http port: {port} given, 1 to 65535 is allowed"):
        check_ports({"http": port})


def test_one_port_for_two_uses_is_refused():
    with pytest.raises(ConfigError, match="gRPC port: 8000 given, which is the http port too"):
        check_ports({"http": 8000, "gRPC": 8000})


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
@pytest.mark.parametrize("option", ["SO_REUSEADDR", "SO_REUSEPORT"])
def test_a_taken_port_is_refused(address, option):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        other.bind((address, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics port: {port} given, which cannot be taken: Address already"):
            check_ports({"metrics": port})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_this_machines_addresses_are_taken(host):
    check_host(host)


@pytest.mark.parametrize("host", ["999.1.1.1", "192.0.2.1", "::1", "no such host"])
def test_another_machines_address_is_refused(host):
    with pytest.raises(ConfigError, match=f"host: '{host}' given, which is no IPv4 address of this machine"):
        check_host(host)
