"""The one check that every string from a client passes: it must be Unicode text."""

from kimi_backend.errors import InvalidRequestError


def require_valid_unicode(text: str, field: str) -> None:
    """Pass silently when `text` can be written as UTF-8.

    A Python string can hold lone surrogates (JSON's "\\ud800" makes one), which are not characters: no tokenizer was
    trained on them and no reply could echo them. They are refused, not replaced, so that nobody's input is changed
    without a word.

    Raises:
        InvalidRequestError: names the field, the code point and its place.
    """
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field}: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X};"
            " only text that can be encoded as UTF-8 is allowed"
        ) from None
