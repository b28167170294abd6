"""The settings' changes to a draft's checkpoint: fewer tokens in its head, another format of its weights."""

from pathlib import Path

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.token_counts import TOKEN_COUNTS_FILE, TokenCounts
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.models.reduced_vocabulary import reduce_vocabulary


def chosen_draft(settings: ServingSettings, draft: DraftCheckpoint, target: TargetCheckpoint) -> DraftCheckpoint:
    """The draft with the `draft_vocab` most frequent tokens; as it is where the setting is 0.

    Raises:
        ConfigError: no counts are found, or they do not fit the draft.
    """
    if not settings.draft_vocab:
        return draft
    counts = _token_counts(settings, draft)
    return reduce_vocabulary(draft, target.tensors, settings.draft_vocab, counts)


def linear_format(settings: ServingSettings) -> LinearFormat:
    """Return the format of the draft's linear layers."""
    return LinearFormat(settings.draft_quantization)


def head_format(settings: ServingSettings) -> LinearFormat:
    """Return the format of the draft's head."""
    return LinearFormat(settings.draft_head_quantization or settings.draft_quantization)


def _token_counts(settings: ServingSettings, draft: DraftCheckpoint) -> TokenCounts:
    path = Path(settings.draft_vocab_counts) if settings.draft_vocab_counts else draft.path / TOKEN_COUNTS_FILE
    if path.is_file():
        return TokenCounts.read(path)
    if settings.load_format == "dummy" and not settings.draft_vocab_counts:
        # No tokenizer, no text: any tokens cost the same time.
        return TokenCounts(vocab_size=draft.config.vocab_size, token_ids=(), counts=())
    raise ConfigError(
        f"setting draft_vocab: {settings.draft_vocab} given, but there are no token counts at {path};"
        " `kimi count-tokens` writes them"
    )
