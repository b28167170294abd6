"""An OpenAI-compatible HTTP endpoint in front of `spec_ensemble`. A process of its own, a client like any other."""

from kimi_openai.serve import make_server, open_socket, serve
from kimi_openai.settings import EndpointSettings

__all__ = ["EndpointSettings", "make_server", "open_socket", "serve"]
