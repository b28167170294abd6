"""The error of each check of the engine: a planted fault must be seen by its own check, not by any that comes first."""


class WrongTokensError(AssertionError):
    """A request got other tokens than plain decoding gives."""


class WrongCountsError(AssertionError):
    """A request was told other counts of its tokens than it got."""


class RejectedDraftError(AssertionError):
    """A draft token was rejected although the draft's distribution is the target's."""


class WrongTextError(AssertionError):
    """A client read other text than its tokens give up to the stop string."""


class PoisonSpreadError(AssertionError):
    """A row of NaN changed another sequence, or did not end its own."""


class AuxMismatchError(AssertionError):
    """A draft's row was given the aux hidden state of another prefix."""


class StaleSlotError(AssertionError):
    """A sequence read a slot that its own prefix did not write."""
