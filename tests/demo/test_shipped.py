"""The pair that ships stays small enough for git."""

from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "demo/kimi-nano"
LIMIT_BYTES = 20 * 2**20


def test_the_shipped_pair_is_under_20_mib() -> None:
    files = [*SHIPPED.glob("*"), *(SHIPPED / "draft").glob("*")]
    assert sum(file.stat().st_size for file in files if file.is_file()) < LIMIT_BYTES
