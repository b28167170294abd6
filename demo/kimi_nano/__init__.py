"""kimi-nano: trains a miniature Kimi-K2.5 and its EAGLE3 drafts on Python sources, and measures what they accept."""
