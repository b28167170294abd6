"""Reads tables that rich has printed."""


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each row behind its first; of tables with borders, without their heads."""
    lines = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}
