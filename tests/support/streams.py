"""Loading models of a running server again, and asking it until it answers."""

import contextlib
import json
import time
import urllib.request
from typing import Any

from kimi_backend.hosting.admin_access import admin_headers
from kimi_backend.hosting.embedded_server import EmbeddedServer
from kimi_client import Completion, KimiClient, KimiClientError

RELOAD_WITHIN_S = 90
POLL_S = 0.1


def control(server: EmbeddedServer, model: str, action: str) -> None:
    """action: "load" or "unload"."""
    url = f"http://127.0.0.1:{server.ports.http}/v2/repository/models/{model}/{action}"
    headers = admin_headers(server.admin_secret)
    request = urllib.request.Request(url, data=json.dumps({}).encode(), method="POST", headers=headers)
    urllib.request.urlopen(request, timeout=60).close()


def is_ready(server: EmbeddedServer, model: str) -> bool:
    with contextlib.suppress(OSError):
        url = f"http://127.0.0.1:{server.ports.http}/v2/models/{model}/ready"
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    return False


def reload(server: EmbeddedServer, model: str) -> None:
    """Unload, wait until it is gone, load."""
    control(server, model, "unload")
    deadline = time.monotonic() + RELOAD_WITHIN_S
    while is_ready(server, model) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    control(server, model, "load")


def generate_when_back(client: KimiClient, within_s: float = 60, **fields: Any) -> Completion:
    """The first completion that is no error."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return client.generate(**fields)
        except KimiClientError:
            if time.monotonic() > deadline:
                raise
            time.sleep(2 * POLL_S)


def wait_for_speculation(client: KimiClient, within_s: float = 60) -> None:
    """Until a completion comes that was speculated on."""
    deadline = time.monotonic() + within_s
    while generate_when_back(client, text_input="x", max_tokens=8, ignore_eos=True).speculation is None:
        assert time.monotonic() < deadline, "speculation stayed off"
        time.sleep(POLL_S)
