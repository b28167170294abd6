"""`kimi count-tokens`: how often each token occurs in files, for a draft that proposes frequent tokens only."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

_SHOWN_PARTS = (16, 8, 4, 2)


def count_tokens_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of the target and its tokenizer.")],
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="Text files; .jsonl holds text, token_ids or messages on each line."),
    ],
    out: Annotated[Path, typer.Option(help="File to write, such as DRAFT/token_counts.json.")],
) -> None:
    """Count tokens in FILES and write the counts that the setting draft_vocab chooses tokens by.

    Best counted is what the target writes: its answers, as {"token_ids": [...]} or {"messages": [...]} a line.
    """
    from rich.console import Console
    from rich.progress import track

    from kimi_backend.checkpoint.token_counts import TokenCounts
    from kimi_backend.config.model_config import KimiModelConfig
    from kimi_backend.errors import InvalidRequestError
    from kimi_backend.text.chat_template import load_chat_template
    from kimi_backend.text.text_files import read_documents
    from kimi_backend.text.tokenizer import load_tokenizer

    vocab_size = KimiModelConfig.from_hf_json(checkpoint).vocab_size
    tokenizer = load_tokenizer(checkpoint)
    template = load_chat_template(checkpoint, tokenizer)
    encode_chat = None if template is None else lambda messages: template.encode(messages, add_generation_prompt=False)
    counted: Counter[int] = Counter()
    for path in track(files, "counting", console=Console(stderr=True), transient=True):
        for token_ids in read_documents(path, tokenizer, encode_chat):
            counted.update(token_ids)
    if not counted:
        raise InvalidRequestError(f"{files[0]}: no tokens in the files given, at least one is needed")
    counts = TokenCounts.of(counted, vocab_size)
    counts.write(out)
    typer.echo(f"{out}: {counts.num_tokens:,} tokens, {len(counts.token_ids):,} of {vocab_size:,} different ones")
    for size in (vocab_size // part for part in _SHOWN_PARTS):
        typer.echo(f"  the most frequent {size:,} make up {100 * counts.share(size):.2f} %")
