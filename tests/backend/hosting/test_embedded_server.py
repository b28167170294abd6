"""What is checked before the embedded server starts, and what it must not leave behind."""

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
