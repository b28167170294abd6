"""Replies that leave for the server can always be sent."""

import logging
from types import SimpleNamespace

import pytest

from kimi_backend.errors import CapacityError, InvalidRequestError
from kimi_backend.serving.triton_errors import LONGEST_MESSAGE, _ServerLogHandler, error_response, forward_logs
from support import fake_pb_utils


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRequestError("top_p: 2 given"), "INVALID_ARG: top_p: 2 given"),
        (CapacityError("full"), "UNAVAILABLE: full"),
        (KeyError("secret"), "INTERNAL: internal error (KeyError); the server's log has the details"),
        (InvalidRequestError("a\ud800b: unknown"), "INVALID_ARG: a\\ud800b: unknown"),
    ],
)
def test_an_error_has_its_code_and_is_utf_8(error: Exception, message: str) -> None:
    sent = error_response(fake_pb_utils, error).error().message()
    assert sent == message
    sent.encode()


def test_a_message_that_quotes_much_is_cut() -> None:
    sent = error_response(fake_pb_utils, InvalidRequestError("x" * 10**6)).error().message()
    assert len(sent) == LONGEST_MESSAGE + len("INVALID_ARG: ")
    assert sent.endswith("x…")


def test_a_log_record_is_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Log:
        log_info = log_warn = log_error = staticmethod(seen.append)

    monkeypatch.setattr(fake_pb_utils, "Logger", Log, raising=False)
    logger = logging.getLogger("kimi_backend")
    before = (logger.handlers, logger.level, logger.propagate)
    try:
        forward_logs(fake_pb_utils, "INFO")
        logging.getLogger("kimi_backend.serving").info("request %s", "\ud800")
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    assert seen == ["kimi_backend.serving request \\ud800"]


def test_a_record_goes_out_by_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    log = SimpleNamespace(
        **{f"log_{level}": lambda text, level=level: seen.append((level, text)) for level in ("info", "warn", "error")}
    )
    handler = _ServerLogHandler(log)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        handler.emit(logging.LogRecord("a", level, "", 0, "%d", (level,), None))
    assert seen == [("info", "a 10"), ("info", "a 20"), ("warn", "a 30"), ("error", "a 40"), ("error", "a 50")]
