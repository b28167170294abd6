"""xgrammar's compiled library, loaded by itself.

`import xgrammar` imports torch and transformers, 260 MB and seconds; the library behind it needs neither. Its objects
are known to tvm_ffi by name, so the classes here are all there is to a binding of it. They belong to the version that
pyproject.toml names.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

_WITHOUT = "torch"
"""tvm_ffi imports it where it finds it, for tensors of its own that nothing here uses."""


def _import_tvm_ffi() -> Any:
    hides = _WITHOUT not in sys.modules
    if hides:
        sys.modules[_WITHOUT] = None  # type: ignore[assignment]
    try:
        import tvm_ffi
        import tvm_ffi.libinfo
    finally:
        if hides:
            del sys.modules[_WITHOUT]
    return tvm_ffi


def _load() -> Any:
    tvm_ffi = _import_tvm_ffi()
    found = importlib.util.find_spec("xgrammar")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("xgrammar is not installed: pip install 'kimi-spec-serving[server]'")
    folders = [Path(folder) for folder in found.submodule_search_locations]
    tvm_ffi.libinfo.load_lib_module("xgrammar", "xgrammar_bindings", extra_lib_paths=folders)
    return tvm_ffi


_TVM_FFI = _load()


def _bound(name: str) -> Any:
    known_as = f"xgrammar.tvm_ffi_binding.{name}"
    return _TVM_FFI.register_object(known_as)(type(name, (_TVM_FFI.Object,), {}))


CompiledGrammar: Any = _bound("CompiledGrammar")
GrammarCompiler: Any = _bound("GrammarCompiler")
GrammarMatcher: Any = _bound("GrammarMatcher")
GrammarText: Any = _bound("Grammar")
TokenizerInfo: Any = _bound("TokenizerInfo")

LibraryError: type[Exception] = RuntimeError
"""The library raises it for everything."""
RAW_VOCABULARY = 0
"""A vocabulary of bytes as they are."""
