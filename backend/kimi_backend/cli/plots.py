"""Pictures of `kimi bench`, where matplotlib is installed."""

from typing import TYPE_CHECKING

from kimi_backend.errors import InvalidRequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(*, figsize: tuple[float, float]) -> "Figure":
    """An empty figure, in inches.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequestError("--plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=figsize, layout="constrained")
