"""The APIs of Triton Server that need the admin secret, and how a request shows it.

Over the model repository's API a client loads Python code of its own, over shared memory's it reads what other
processes have there, over trace's and logging's it writes files. A header of our own also makes a browser ask before it
sends such a request for a web page, and Triton Server does not allow that.
"""

import ipaddress
import re
import secrets
from collections.abc import Mapping

from kimi_backend.errors import ConfigError

ADMIN_HEADER = "kimi-admin"
SECRET_VARIABLE = "KIMI_ADMIN_SECRET"
ALWAYS_RESTRICTED = ("shared-memory", "model-repository", "trace", "logging")
OPEN_ON_LOOPBACK = ("model-config", "statistics")
"""They only read, and perf_analyzer needs them."""
_RANDOM_BYTES = 16
_ALLOWED = re.compile(r"[A-Za-z0-9._~-]+")


def choose_secret(environment: Mapping[str, str]) -> str:
    """The operator's own secret, or a random one.

    Raises:
        ConfigError: the operator's cannot stand on Triton Server's command line. Does not show it.
    """
    given = environment.get(SECRET_VARIABLE, "")
    if given and not _ALLOWED.fullmatch(given):
        raise ConfigError(f"{SECRET_VARIABLE}: letters, digits and any of . _ ~ - are allowed; it holds something else")
    return given or secrets.token_hex(_RANDOM_BYTES)


def admin_headers(secret: str) -> dict[str, str]:
    """Make the headers that open the restricted APIs to an HTTP request."""
    return {ADMIN_HEADER: secret}


def admin_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """Make the headers that open them to a gRPC call."""
    return ((f"triton-grpc-protocol-{ADMIN_HEADER}", secret),)


def restricting_options(secret: str, host: str) -> list[str]:
    """Triton Server's options that restrict the admin APIs on both protocols.

    Args:
        host: what the server listens on.
    """
    groups = ",".join(ALWAYS_RESTRICTED if _is_loopback(host) else ALWAYS_RESTRICTED + OPEN_ON_LOOPBACK)
    rule = f"{groups}:{ADMIN_HEADER}={secret}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


def _is_loopback(host: str) -> bool:
    """Tell whether this machine alone reaches the address; False for a name, which may be anything's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
