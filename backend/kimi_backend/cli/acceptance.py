"""The origin of a measurement's acceptance, said in every output of `kimi bench`."""

from collections.abc import Sequence


def acceptance_kind(pretences: Sequence[str]) -> str:
    """Say where acceptance comes from: real, or what a server that pretends says of it in its `pretences`."""
    made_up = [pretence for pretence in pretences if pretence.startswith("acceptance")]
    return ", ".join(made_up) or ("real, of dummy weights" if "weights dummy" in pretences else "real")
