"""A small made-up corpus of Python files that a micro model learns in seconds."""

import random

from kimi_nano.corpus import SourceFile

_WORDS = """
    account address balance buffer channel client column config counter cursor device document element engine entry
    filter folder format handle header history index invoice journal keyword label layer ledger limit margin matrix
    member message method number object offset option order output packet palette parcel parser partner payment
    pointer policy printer profile project query queue reader record region report request result return sample
    schema screen segment server session setting signal socket source stage status stream string supply switch symbol
    system table target ticket token total tracker transfer update user value vector version village volume warehouse
    widget window worker
"""
WORDS = _WORDS.split()


def made_up_files(num_files: int = 200, seed: int = 0) -> list[SourceFile]:
    """Much alike, which `load_corpus` would throw out as copies."""
    rng = random.Random(seed)
    return [SourceFile(f"made-up/module_{number}.py", "MIT", _source(rng)) for number in range(num_files)]


def _source(rng: random.Random) -> str:
    """A class with accessors: after a few tokens of a method, the rest of it is certain."""
    owner = rng.choice(WORDS)
    lines = [f"class {owner.title()}:", f'    """One {owner}."""', ""]
    for name in rng.sample(WORDS, 5):
        lines += [
            f"    def set_{name}(self, {name}):",
            f'        """Change the {name}."""',
            f"        if {name} is None:",
            f'            raise ValueError("{name} is missing")',
            f"        if {name} == self.{name}:",
            "            return self",
            f"        self.{name} = {name}",
            f"        self.changed.add({name})",
            "        return self",
            "",
            f"    def get_{name}(self):",
            f"        return self.{name}",
            "",
        ]
    return "\n".join(lines)
