"""Errors and log records on their way out to Triton Server: one mapping, no traceback to a client."""

import logging
from typing import Any

from kimi_backend.errors import KimiError

LOGGER_NAME = "kimi_backend"
CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")
"""The codes with which an error's message begins."""
LONGEST_MESSAGE = 2_000
"""Characters of an error that a client gets: it may quote what the client sent."""


def coded_error(pb_utils: Any, code: str, message: str) -> Any:
    """A server error whose message begins with its code.

    A gRPC stream carries an error's message only. Its code comes with the header `triton_grpc_error`, but streams with
    that header crash Triton Server 24.10 after some thousand errors.
    """
    return pb_utils.TritonError(f"{code}: {sendable(message)}", getattr(pb_utils.TritonError, code))


def sendable(message: str) -> str:
    """The message so that it can be sent: UTF-8 (a quoted name may hold a lone surrogate), and not without end."""
    text = message.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"


def triton_error(pb_utils: Any, error: BaseException) -> Any:
    """The server's error for an exception: code and message if raised on purpose, else INTERNAL and its type."""
    if isinstance(error, KimiError):
        return coded_error(pb_utils, error.code, str(error))
    message = f"internal error ({type(error).__name__}); the server's log has the details"
    return coded_error(pb_utils, KimiError.code, message)


def error_response(pb_utils: Any, error: BaseException) -> Any:
    """A response that carries nothing but the error; unexpected exceptions are logged with their traceback."""
    if not isinstance(error, KimiError):
        logging.getLogger(f"{LOGGER_NAME}.serving").error("unexpected error", exc_info=error)
    return pb_utils.InferenceResponse(output_tensors=[], error=triton_error(pb_utils, error))


class _ServerLogHandler(logging.Handler):
    """Forwards records to Triton Server's own log."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger
        self.setFormatter(logging.Formatter("%(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).encode("utf-8", "backslashreplace").decode()
        if record.levelno >= logging.ERROR:
            self._logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.log_warn(text)
        else:
            self._logger.log_info(text)


def forward_logs(pb_utils: Any, level: str) -> None:
    """Send this package's log records to the server's log, from `level` up."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers = [_ServerLogHandler(pb_utils.Logger)]
    logger.setLevel(level)
    logger.propagate = False
