"""What is checked before the embedded server starts, and what it must not leave behind."""

import socket
from pathlib import Path

import pytest

from kimi_backend.errors import ConfigError
from kimi_backend.hosting import embedded_server
from kimi_backend.hosting.embedded_server import (
    EmbeddedServer,
    ServerPorts,
    check_shared_memory,
    sweep_regions,
)
from kimi_backend.hosting.server_installation import ServerInstallation


def test_only_regions_of_the_prefix_are_swept(tmp_path):
    for name in ("kimi_8000_a", "kimi_8000_b", "kimi_80001", "other"):
        (tmp_path / name).write_text("x")
    assert sorted(sweep_regions("kimi_8000_", tmp_path)) == ["kimi_8000_a", "kimi_8000_b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kimi_80001", "other"]


def test_too_little_shared_memory_says_so(tmp_path):
    check_shared_memory(tmp_path, needed_bytes=1)
    with pytest.raises(ConfigError, match="MiB are needed"):
        check_shared_memory(tmp_path, needed_bytes=2**60)
    with pytest.raises(ConfigError, match="is missing"):
        check_shared_memory(tmp_path / "none")


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
