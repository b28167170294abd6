"""Declarations in code that docs/ or config.pbtxt repeat say the same in both places."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("write_generated_files", ROOT / "scripts/write_generated_files.py")
assert _spec is not None and _spec.loader is not None
generator = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generator)


@pytest.mark.parametrize("name", list(generator.GENERATED))
def test_file_matches_the_code(name):
    text = (ROOT / name).read_text()
    assert generator.GENERATED[name](text) == text, "run `make generated`"
