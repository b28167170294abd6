"""Requests are answered under the endpoint's own names only.

A web page can make its own name resolve to this machine and then talk to a server here as if it were its own: the
header Host shows that. It can also send simple requests to any address without asking: the header Origin shows that.
"""

import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kimi_openai.errors import ApiError

_LOCAL_NAME = "localhost"
_HOST = re.compile(r"(?:\[(?P<number>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::\d+)?")


class OwnNames:
    """Middleware that refuses requests to other hosts and from pages of other origins.

    A host that is a number is its own: nobody can make that lead to another machine than the one that it names.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], origins: Collection[str] = ()) -> None:
        """
        Args:
            names: what the endpoint is called besides, by hosts with or without a port.
            origins: of pages elsewhere that may ask.
        """
        self._app = app
        self._origins = frozenset(origin.lower() for origin in origins)
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on, or answer it with 403."""
        problem = self.problem_of(Headers(scope=scope)) if scope["type"] == "http" else ""
        if problem:
            await JSONResponse(ApiError(403, problem).body(), 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def problem_of(self, headers: Headers) -> str:
        """Say what is wrong with a request; empty where nothing is."""
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) > 1 or len(origins) > 1:
            return "headers Host and Origin: one of each is allowed"
        host = hosts[0].lower() if hosts else ""
        if host and not self._is_own(host):
            return _refusal("Host")
        if origins and not self._is_own_origin(origins[0].lower(), host):
            return _refusal("Origin")
        return ""

    def _is_own(self, host: str) -> bool:
        name = _name_of(host)
        return name == _LOCAL_NAME or _is_number(name) or not self._names.isdisjoint({name, host})

    def _is_own_origin(self, origin: str, host: str) -> bool:
        """Tell whether a page has the name that it sends this request to, or one of the operator's."""
        if origin in self._origins:
            return True
        scheme, _, page = origin.partition("://")
        if scheme not in ("http", "https") or not page:
            return False
        return page == host or not self._names.isdisjoint({_name_of(page), page})


def _name_of(host: str) -> str:
    """A host without its port; empty if it is none."""
    found = _HOST.fullmatch(host)
    return (found["number"] or found["name"]) if found else ""


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(header: str) -> str:
    return f"header {header}: not a name of this endpoint; the operator's KIMI_OPENAI_NAMES lists more"
