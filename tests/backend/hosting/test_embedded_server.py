"""Checks before the embedded server starts, and traces that it must not leave behind."""

import socket
from pathlib import Path

import pytest

from kimi_backend.errors import ConfigError
from kimi_backend.hosting import embedded_server
from kimi_backend.hosting.embedded_server import EmbeddedServer, ServerPorts
from kimi_backend.hosting.server_installation import ServerInstallation


def test_a_taken_port_is_refused_before_its_owners_regions_are_swept(monkeypatch):
    swept: list[str] = []
    monkeypatch.setattr(embedded_server, "find_installation", lambda: ServerInstallation(Path("/none"), ()))
    monkeypatch.setattr(embedded_server, "sweep_regions", swept.append)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        server = EmbeddedServer(Path("/none"), ports=ServerPorts(http=other.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"HTTP port: \d+ given, which cannot be taken"):
            server.start()
    assert swept == []


def test_http_stays_on_this_machine_whatever_the_host(monkeypatch):
    monkeypatch.setattr(embedded_server, "find_installation", lambda: ServerInstallation(Path("/none"), ()))
    command = EmbeddedServer(Path("/none"), host="0.0.0.0")._command()
    addresses = {option.split("-address=")[0]: option.split("=")[1] for option in command if "-address=" in option}
    assert addresses == {"--http": "127.0.0.1", "--grpc": "0.0.0.0", "--metrics": "0.0.0.0"}
