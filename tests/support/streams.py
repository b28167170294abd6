"""Loading models of a running server again, and asking it until it answers."""

import contextlib
import json
import urllib.request
from typing import Any

from kimi_backend.hosting.admin_access import admin_headers
from kimi_backend.hosting.embedded_server import EmbeddedServer
from kimi_client import Completion, KimiClient, KimiClientError
from support.waiting import PATIENCE_S, wait_for

POLL_S = 0.1


def control(server: EmbeddedServer, model: str, action: str) -> None:
    """action: "load" or "unload"."""
    url = f"http://127.0.0.1:{server.ports.http}/v2/repository/models/{model}/{action}"
    headers = admin_headers(server.admin_secret)
    request = urllib.request.Request(url, data=json.dumps({}).encode(), method="POST", headers=headers)
    urllib.request.urlopen(request, timeout=PATIENCE_S).close()


def is_ready(server: EmbeddedServer, model: str) -> bool:
    with contextlib.suppress(OSError):
        url = f"http://127.0.0.1:{server.ports.http}/v2/models/{model}/ready"
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    return False


def reload(server: EmbeddedServer, model: str) -> None:
    """Unload, wait until it is gone, load."""
    control(server, model, "unload")
    wait_for(lambda: not is_ready(server, model), f"{model} stays", poll_s=POLL_S)
    control(server, model, "load")


def generate_when_back(client: KimiClient, **fields: Any) -> Completion:
    """The first completion that is no error."""

    def ask() -> Completion | None:
        with contextlib.suppress(KimiClientError):
            return client.generate(**fields)
        return None

    completion = wait_for(ask, "every completion is an error", poll_s=2 * POLL_S)
    assert completion is not None
    return completion


def wait_for_speculation(client: KimiClient) -> None:
    """Ask until a completion comes that was speculated on."""
    fields = {"text_input": "x", "max_tokens": 8, "ignore_eos": True}
    wait_for(lambda: generate_when_back(client, **fields).speculation, "speculation stayed off", poll_s=POLL_S)
