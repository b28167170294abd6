import importlib.util
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_site.py"


def test_everything_shown_is_copied_and_the_pages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MkDocs, which builds the site of them, need not be installed."""
    for name in ("mkdocs", "commands.build", "config", "config.defaults", "exceptions"):
        monkeypatch.setitem(sys.modules, name if name == "mkdocs" else f"mkdocs.{name}", MagicMock())
    spec = importlib.util.spec_from_file_location("build_site", SCRIPT)
    assert spec is not None and spec.loader is not None
    build_site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_site)
    monkeypatch.setattr(build_site, "SHOWN", ("README.md", "docs/architecture.md", "LICENSE"))
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/left_over.md").touch()
    assert sorted(build_site.gather(tmp_path / "pages")) == ["README.md", "docs/architecture.md"]
    copied = {str(path.relative_to(tmp_path / "pages")) for path in (tmp_path / "pages").rglob("*") if path.is_file()}
    assert copied == {"README.md", "docs/architecture.md", "LICENSE"}
