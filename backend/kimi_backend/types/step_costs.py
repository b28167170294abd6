"""Times of one runner's steps, measured once: the values that k is chosen by (docs/decisions/0017)."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from kimi_backend.errors import InvalidRequestError

Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Microseconds of decode steps, by number of sequences and by rows of each. n sizes, q numbers of rows."""

    num_seqs: tuple[int, ...]
    """[n] rising."""
    query_lens: tuple[int, ...]
    """[q] rising from 1; two at least."""
    is_captured: bool
    """A step takes the shape of the next larger numbers here, and what it has fewer is padding."""
    context_len: int
    """Tokens of each sequence in `step_us` and `padded_us`."""
    step_us: Grid
    """[n, q] with every row live."""
    padded_us: Grid
    """[n, q] with all rows of one sequence live and one of every other; the same of a runner that does not capture."""
    context_us: tuple[float, ...]
    """[n] of each further token of context of all sequences together, for one pass over it with a row a sequence."""
    row_context_us: tuple[float, ...]
    """[n] what each further row of all sequences adds to that: a row's keys are its own."""
    proposals_us: Grid = ()
    """[n, K] of a draft: what drawing 1, 2, … K proposals adds to its step."""

    def __post_init__(self) -> None:
        grids = [self.step_us, self.padded_us]
        fits = all(len(grid) == len(self.num_seqs) for grid in [*grids, self.context_us, self.row_context_us])
        fits = fits and all(len(row) == len(self.query_lens) for grid in grids for row in grid)
        drawn = {len(row) for row in self.proposals_us}
        fits = fits and len(self.proposals_us) in (0, len(self.num_seqs)) and len(drawn) < 2 and 0 not in drawn
        numbers = [value for grid in [*grids, self.proposals_us] for row in grid for value in row]
        numbers += [*self.context_us, *self.row_context_us]
        if not fits or not self.num_seqs or len(self.query_lens) < 2 or min(numbers) < 0:
            raise InvalidRequestError("step costs: their shapes do not fit together, or a time is below 0")

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "StepCosts":
        """The other way round.

        Raises:
            InvalidRequestError: they are another version's, or no such costs.
        """
        try:
            values = {name: _tuples(value) for name, value in dict(json.loads(text)).items()}
            if set(values) != {field.name for field in fields(cls)}:
                raise ValueError("other fields")
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"step costs do not fit this version: {error}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
