"""The proposer of the tokens that a verify checks. The text is the same, whoever it is."""

from enum import Enum


class Proposer(str, Enum):
    """Values of the setting and request field `proposer`."""

    NONE = "none"
    EAGLE3 = "eagle3"
    """The draft model."""
    LOOKUP = "lookup"
    """The sequence's own text: what came next where its last tokens stood before. Needs no draft."""
    LOOKUP_EAGLE3 = "lookup+eagle3"
    """Either of both, for each sequence and round the one that is expected to be right more often."""

    @property
    def uses_draft(self) -> bool:
        """True where the draft model takes part."""
        return self in (Proposer.EAGLE3, Proposer.LOOKUP_EAGLE3)

    @property
    def uses_lookup(self) -> bool:
        """True where the text is indexed."""
        return self in (Proposer.LOOKUP, Proposer.LOOKUP_EAGLE3)

    def is_part_of(self, other: "Proposer") -> bool:
        """True where somebody with the other one can do the same."""
        return self.uses_draft <= other.uses_draft and self.uses_lookup <= other.uses_lookup

    @classmethod
    def parts_of(cls, whole: "Proposer") -> "list[Proposer]":
        """Those that a request may ask for where the server has `whole`."""
        return [proposer for proposer in cls if proposer.is_part_of(whole)]
