"""Calls that the processes beside a server make to it over HTTP, with the admin secret."""

import time
import urllib.error
import urllib.request

from kimi_backend.hosting.admin_access import admin_headers

_ANSWER_S = 5.0
_LOAD_S = 3600.0
_POLL_S = 0.25


class ServerApi:
    """One server's readiness and model control."""

    def __init__(self, address: str, secret: str) -> None:
        """
        Args:
            address: host:port of its HTTP endpoint.
        """
        self._base = f"http://{address}/v2"
        self._secret = secret

    def is_ready(self, model: str) -> bool | None:
        """None: the server does not answer."""
        try:
            urllib.request.urlopen(f"{self._base}/models/{model}/ready", timeout=_ANSWER_S).close()
        except urllib.error.HTTPError:
            return False
        except OSError:
            return None
        return True

    def unload(self, model: str) -> None:
        """Make it unready at once; requests that it has taken go on, and it is gone after the last of them.

        Raises:
            OSError: the server refused or does not answer.
        """
        self._control(model, "unload", _ANSWER_S)

    def reload(self, model: str) -> None:
        """Unload, wait until it is gone, load.

        Raises:
            OSError: the server refused or does not answer.
        """
        self._control(model, "unload", _LOAD_S)
        deadline = time.monotonic() + _LOAD_S
        while self.is_ready(model) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._control(model, "load", _LOAD_S)

    def _control(self, model: str, action: str, timeout_s: float) -> None:
        url = f"{self._base}/repository/models/{model}/{action}"
        request = urllib.request.Request(url, data=b"{}", method="POST", headers=admin_headers(self._secret))
        urllib.request.urlopen(request, timeout=timeout_s).close()
