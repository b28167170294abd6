"""Logs of the endpoint: text or JSON to standard error, its own lines at a rate, an access log if it is wanted."""

import logging

from pythonjsonlogger.json import JsonFormatter

from kimi_openai.log_limits import RateLimit
from kimi_openai.observing import ACCESS_LOGGER

_TEXT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def set_up_logs(*, as_json: bool, with_access: bool) -> None:
    """Replace the handlers of this process's loggers.

    Args:
        as_json: an object a line, with the fields of the access log as its own.
        with_access: a line for each request, at no limit; else there is none.
    """
    formatter = JsonFormatter(_TEXT) if as_json else logging.Formatter(_TEXT)
    handler, access_handler = logging.StreamHandler(), logging.StreamHandler()
    for each in (handler, access_handler):
        each.setFormatter(formatter)
    handler.addFilter(RateLimit())
    logging.getLogger().handlers = [handler]
    access = logging.getLogger(ACCESS_LOGGER)
    access.handlers, access.propagate = [access_handler], False
    access.setLevel(logging.INFO if with_access else logging.CRITICAL)
