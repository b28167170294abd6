"""The corpus: Python sources that any machine with Python has, under permissive licences, without copies.

A file is known by a key that does not depend on the machine: `stdlib/json/decoder.py`, `numpy/numpy/ma/core.py`
(distribution, then the path below site-packages). The hash of the key decides whether the file is held out.
"""

import ast
import hashlib
import importlib.metadata
import io
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 24
MIN_BYTES = 400
MAX_BYTES = 400_000
LONG_LINE = 24
"""Characters of a line that is looked at when files are compared: shorter ones are alike everywhere."""
MAX_SEEN_LINES = 0.5
"""Share of a file's long lines that other files may hold already."""
STDLIB = "stdlib"
STDLIB_LICENCE = "PSF-2.0"

_SPDX = {
    "mit", "mit-0", "bsd-2-clause", "bsd-3-clause", "0bsd", "apache-2.0", "psf-2.0", "isc", "bsl-1.0",
    "apache-2.0 with llvm-exception",
}  # fmt: skip
_CLASSIFIERS = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
}
_NAMES = {
    "mit": "MIT",
    "mit license": "MIT",
    "bsd": "BSD",
    "bsd license": "BSD",
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
}
_SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "test", "idlelib", "lib2to3", "turtledemo"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus."""

    key: str
    licence: str
    text: str
    """The file's text without the comments at its head: they are the same notice in thousands of files."""

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.key)

    @property
    def distribution(self) -> str:
        return self.key.split("/", 1)[0]


def key_hash(key: str) -> int:
    """64 bits of the key's SHA-256: the order of files, and whether one is held out."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def is_held_out(key: str) -> bool:
    return key_hash(key) % HELD_OUT_ONE_IN == 0


def permissive_licence(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """The licence that a distribution declares, if every part of it is MIT, BSD, Apache, PSF, ISC or Boost."""
    expression = (metadata["License-Expression"] or "").strip() if "License-Expression" in metadata else ""
    field = (metadata["License"] or "").strip() if "License" in metadata else ""
    for stated in (expression, field):
        if stated.lower() in _NAMES:
            return _NAMES[stated.lower()]
        parts = re.split(r"\s+(?:and|or)\s+", stated.lower().replace("(", "").replace(")", ""))
        if stated and all(part in _SPDX for part in parts):
            return stated
    if expression:
        return None
    classifiers = [c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    if classifiers and all(c in _CLASSIFIERS for c in classifiers):
        return " AND ".join(_CLASSIFIERS[c] for c in classifiers)
    return None


def strip_head_comments(text: str) -> str:
    """`text` without the comments and blank lines before its first line of code."""
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines))
    return "".join(lines[first:])


def read_source(path: Path) -> str | None:
    """The text of a file that is Python, of a sensible size and without odd line lengths; None if it is not."""
    try:
        raw = path.read_bytes()
        if not MIN_BYTES <= len(raw) <= MAX_BYTES:
            return None
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = strip_head_comments(raw.decode(encoding).replace("\r\n", "\n"))
        ast.parse(text)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError, RecursionError, MemoryError):
        return None
    has_long_lines = max((len(line) for line in text.splitlines()), default=0) > 1000
    return None if has_long_lines or len(text) < MIN_BYTES else text


def stdlib_paths() -> Iterator[tuple[str, str, Path]]:
    """(key, licence, path) of the standard library, its tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not _SKIPPED_FOLDERS.intersection(relative.parts):
            yield f"{STDLIB}/{relative.as_posix()}", STDLIB_LICENCE, path


def distribution_paths() -> Iterator[tuple[str, str, Path]]:
    """(key, licence, path) of the installed distributions whose licence is permissive."""
    for distribution in importlib.metadata.distributions():
        licence = permissive_licence(distribution.metadata)
        if licence is None:
            continue
        name = distribution.metadata["Name"].lower().replace("_", "-")
        for file in distribution.files or []:
            # Outside site-packages are scripts; `_vendor` holds copies under licences of their own.
            if file.suffix == ".py" and ".." not in file.parts and "_vendor" not in file.parts:
                yield f"{name}/{file.as_posix()}", licence, Path(str(distribution.locate_file(file)))


def without_copies(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    """Files in the order of their hash, without those whose long lines were mostly seen in files before them."""
    seen: set[int] = set()
    for file in sorted(files, key=lambda file: (key_hash(file.key), file.key)):
        lines = {hash(line.strip()) for line in file.text.splitlines() if len(line.strip()) >= LONG_LINE}
        if lines and len(lines & seen) <= MAX_SEEN_LINES * len(lines):
            yield file
        seen |= lines


def load_corpus(paths: Iterable[tuple[str, str, Path]] | None = None) -> list[SourceFile]:
    """Read, check and de-duplicate.

    Args:
        paths: (key, licence, path); by default the standard library and all permissive distributions.
    """
    if paths is None:
        paths = [*stdlib_paths(), *distribution_paths()]
    read = ((key, licence, read_source(path)) for key, licence, path in paths)
    return list(without_copies(SourceFile(key, licence, text) for key, licence, text in read if text is not None))
