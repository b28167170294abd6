"""The chat page: one HTML file, which may load nothing and talk to nobody but this endpoint."""

import base64
import hashlib
import importlib.resources
import re

from starlette.requests import Request
from starlette.responses import Response

_ALLOWED = {
    "default-src": "'none'",
    "connect-src": "'self'",
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}


async def show_chat_page(request: Request) -> Response:
    """Answer `/` with the page. It holds nothing secret and needs no key; its requests to /v1 do."""
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


def _policy(page: str) -> str:
    """A content security policy under which this page's own script and style run, and no others."""
    allowed = dict(_ALLOWED)
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        allowed[directive] = f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
    return "; ".join(f"{directive} {sources}" for directive, sources in allowed.items())


_PAGE = importlib.resources.files(__package__).joinpath("chat_page.html").read_text(encoding="utf-8")
_HEADERS = {
    "Content-Security-Policy": _policy(_PAGE),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
