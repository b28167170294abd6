"""The origin of a measurement's acceptance, said in every output of `kimi bench`."""

from collections.abc import Sequence


def acceptance_kind(synthetic_parts: Sequence[str]) -> str:
    """Say where acceptance comes from: real, or how a server with synthetic parts makes it up."""
    made_up = [part for part in synthetic_parts if part.startswith("acceptance")]
    return ", ".join(made_up) or ("real, of dummy weights" if "weights dummy" in synthetic_parts else "real")
