"""Values are frozen: threads and processes hand them to one another. Those that change are listed."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
CHANGES = {
    *("Step", "StepBatch", "StepOutput", "DraftStep", "LogprobRows", "SequenceBlocks", "SequenceGrammar"),
    *("Channel", "Conversation", "RequestSpan", "_Job", "_Live"),
}
WITHOUT_SLOTS = {"MlaDims"}
"""Others inherit from it beside a class with slots of its own."""


def dataclasses_below(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """The name of each dataclass, and what its decorator turns on."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for call in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("dataclass"):
                    yield (
                        node.name,
                        {keyword.arg or "" for keyword in call.keywords if ast.unparse(keyword.value) == "True"},
                    )


def test_values_are_frozen_and_have_slots() -> None:
    found = [item for folder in ("backend", "client", "kernels") for item in dataclasses_below(ROOT / folder)]
    assert len(found) > 200
    assert {name for name, on in found if "frozen" not in on} == CHANGES
    assert {name for name, on in found if "slots" not in on} == WITHOUT_SLOTS
