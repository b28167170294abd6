"""Every error a caller can act on.

KimiError
├── InvalidRequestError      the request is wrong; says which field, what was given, what is allowed
├── CapacityError            no room now; try later
│   └── ModelUnavailableError    a runner is loading, dead or of another epoch
├── RequestCancelledError    its client has left
├── CheckpointError          files that cannot be served; lists every reason found
└── ConfigError              a config.json field or a server setting is missing, contradictory or unsupported
"""


class KimiError(Exception):
    """Base of all errors raised on purpose. `code` is the server error code that a client sees."""

    code = "INTERNAL"


class InvalidRequestError(KimiError):
    """A request field is wrong. The message names the field, the value and what is allowed."""

    code = "INVALID_ARG"


class CapacityError(KimiError):
    """Nothing is wrong with the request; there is no room for it now."""

    code = "UNAVAILABLE"


class ModelUnavailableError(CapacityError):
    """A model runner does not answer: loading, dead, or restarted."""


class RequestCancelledError(KimiError):
    """A request whose client left before anything of it was done."""

    code = "CANCELLED"


_SHOWN_AT_EACH_END = 30
"""The problems of a checkpoint that are shown at each end: a damaged index of a large model would make megabytes."""


class CheckpointError(KimiError):
    """A checkpoint cannot be loaded. `problems` holds one line for each thing found wrong."""

    code = "INVALID_ARG"

    def __init__(self, subject: str, problems: list[str]) -> None:
        self.subject = subject
        self.problems = problems
        shown = list(problems)
        if len(problems) > 2 * _SHOWN_AT_EACH_END:
            between = f"... {len(problems) - 2 * _SHOWN_AT_EACH_END} more ..."
            shown[_SHOWN_AT_EACH_END:-_SHOWN_AT_EACH_END] = [between]
        super().__init__(f"{subject}: " + (shown[0] if len(shown) == 1 else "\n  - ".join(["", *shown])))


class ConfigError(KimiError):
    """A configuration value is missing, of the wrong type, contradictory or unsupported."""

    code = "INVALID_ARG"
