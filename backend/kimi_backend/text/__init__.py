"""Text to token ids and back: tokenizers, chat templates, incremental detokenizer, stop strings."""
