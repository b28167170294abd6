"""Lets a server's requests end before it is stopped.

    KIMI_ADMIN_SECRET=… KIMI_DRAIN_FILE=… python -m kimi_backend.hosting.drain HOST:HTTP_PORT

Unloading `spec_ensemble` makes it unready at once: Triton Server refuses new requests, a load balancer looks elsewhere,
and the streams that run go on. The drain file tells it how long they may. With open streams 24.10 would wait
`--exit-timeout-secs` for them and then cut them off without a word.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import KimiError
from kimi_backend.hosting.admin_access import SECRET_VARIABLE
from kimi_backend.hosting.server_api import ServerApi
from kimi_backend.serving.drain_file import DrainFile

ORCHESTRATOR = "spec_ensemble"
POLL_S = 0.05
ANSWERS_WITHIN_S = 5.0
"""A `spec_ensemble` that reports nothing for so long has no requests, as its process has died or never started."""
LAST_RESPONSES_S = 3.0
"""Requests that are cut off at the limit get their error within it."""
SAY_EVERY_S = 5.0


def drain(api: ServerApi, file: DrainFile, limit_s: float, say: Callable[[str], None]) -> bool:
    """Refuse new requests and wait for the live ones. To give them less time meanwhile, order another limit.

    Args:
        limit_s: after so many seconds live requests end with an error.
        say: gets lines of progress.

    Returns:
        Whether every request has had its last response.
    """
    # The order goes first: a server that is slow to answer lengthens nobody's limit.
    if file.limit_s is None:  # else somebody was in a hurry before this began
        file.order(limit_s)
    start = time.monotonic()
    try:
        api.unload(ORCHESTRATOR)
    except OSError as error:
        say(f"{ORCHESTRATOR} cannot be made unready ({error}): it refuses new requests by itself")
    next_word_s, next_look_s = 2.0, 1.0
    while (num_left := file.num_left) != 0:
        time.sleep(POLL_S)
        elapsed_s = time.monotonic() - start
        if elapsed_s > (ANSWERS_WITHIN_S if num_left is None else limit_s + LAST_RESPONSES_S):
            return False
        if elapsed_s >= next_look_s:
            next_look_s = elapsed_s + 1.0
            if api.is_ready(ORCHESTRATOR) is None:
                return False  # nobody is there any more
        if num_left is not None and elapsed_s >= next_word_s:
            next_word_s = elapsed_s + SAY_EVERY_S
            say(f"draining: {num_left} requests are left, for at most {max(0.0, limit_s - elapsed_s):.0f} s")
    return True


def main(arguments: list[str]) -> int:
    """Return 0; 1 where requests were left; 2 where a setting is wrong."""
    (address,) = arguments

    def say(line: str) -> None:
        sys.stderr.write(f"drain: {line}\n")
        sys.stderr.flush()

    try:
        settings = ServingSettings.from_parameters({}, os.environ)
    except KimiError as error:
        say(str(error))
        return 2
    api = ServerApi(address, os.environ.get(SECRET_VARIABLE, ""))
    return 0 if drain(api, DrainFile(Path(settings.drain_file)), settings.drain_timeout_s, say) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
