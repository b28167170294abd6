"""The library behind xgrammar is loaded without what `import xgrammar` brings along."""

import subprocess
import sys

import pytest

from kimi_backend.grammar import library


def test_it_imports_no_torch_and_hides_none() -> None:
    program = (
        "import sys, kimi_backend.grammar.library\n"
        "assert 'tvm_ffi' in sys.modules\n"
        "print([name for name in ('torch', 'transformers', 'xgrammar') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_there_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = object()
    monkeypatch.setitem(sys.modules, "torch", torch)
    library._import_tvm_ffi()
    assert sys.modules["torch"] is torch


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"xgrammar is not installed: pip install"):
        library._load()
