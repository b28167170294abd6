"""A misspelt KIMI_* variable is told, with the name that was meant; one that something reads is not."""

import re
from pathlib import Path

from kimi_backend.config.known_variables import warnings_of_unknown

ROOT = Path(__file__).resolve().parents[3]


def test_a_misspelt_variable_is_told_with_the_near_name() -> None:
    (line,) = warnings_of_unknown(["KIMI_MAX_NUM_SEQ", "KIMI_DRAFT", "HOME"])
    assert line == "warning: the variable KIMI_MAX_NUM_SEQ is not known, nothing reads it: KIMI_MAX_NUM_SEQS?"
    assert warnings_of_unknown(["KIMI_ZZZZZZZZZZ"])[0].endswith("nothing reads it")


def test_every_variable_of_the_deployment_is_known() -> None:
    files = [ROOT / "docker/start.sh", ROOT / "docker/compose.yaml", ROOT / "docker/.env.example"]
    files += [path for folder in ("backend", "client") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in files for name in re.findall(r"\bKIMI_[A-Z0-9_]*[A-Z0-9]\b", path.read_text())}
    assert len(names) > 40
    assert warnings_of_unknown(names - {"KIMI_X", "KIMI_NAME", "KIMI_K25"}) == []
