"""The check that a server can have the address and the ports that it was told to take."""

import socket
from collections.abc import Mapping

from kimi_backend.errors import ConfigError

MAX_PORT = 65_535


def check_ports(ports: Mapping[str, int]) -> None:
    """Pass silently if a server can listen on each of them.

    Asked before anything else: Triton Server takes the lower 16 bits of a larger number, starts with a gRPC port
    that another process shares, and finds other ports taken only after it has loaded the models.

    Args:
        ports: what the port is for -> its number.

    Raises:
        ConfigError: no port number, given twice, or taken.
    """
    given: dict[int, str] = {}
    for use, port in ports.items():
        if not 1 <= port <= MAX_PORT:
            raise ConfigError(f"{use} port: {port} given, 1 to {MAX_PORT} is allowed")
        if port in given:
            raise ConfigError(f"{use} port: {port} given, which is the {given[port]} port too")
        given[port] = use
    for use, port in ports.items():
        with socket.socket() as probe:
            # Connections of a server that has just ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise ConfigError(f"{use} port: {port} given, which cannot be taken: {error.strerror}") from None


def check_host(host: str) -> None:
    """Pass silently if a server can listen on this address.

    Raises:
        ConfigError: this machine does not have it.
    """
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            message = f"host: {host!r} given, which is no IPv4 address of this machine: {error.strerror}"
            raise ConfigError(message) from None
