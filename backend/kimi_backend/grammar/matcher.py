"""Protocols of what the engine needs of a grammar, whichever library compiles and matches it."""

from concurrent.futures import Future
from typing import Protocol

from kimi_backend.types.grammar import Grammar
from kimi_backend.types.plan import Int32Array


class Matcher(Protocol):
    """A place in a grammar: behind the tokens that it was given. Owned by one thread."""

    def fill(self, words: Int32Array) -> None:
        """Write which tokens may come next: [num_words] int32, bit x % 32 of word x // 32 set for each token x."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on behind a token; False, and nothing changes, where it may not come."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Go back by the last tokens that were accepted."""
        ...

    def forced(self, words: Int32Array) -> int | None:
        """The longest token of the text that must come next, where there is only one: a guess, as others may spell it.

        Args:
            words: what `fill` has written here.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar that matchers can be made of. Immutable, so threads may share one."""

    @property
    def text_mask(self) -> Int32Array:
        """[num_words] the tokens that are text: neither control tokens nor ids without a token."""
        ...

    def matcher(self) -> Matcher:
        """One at the grammar's beginning."""
        ...


class GrammarSource(Protocol):
    """Compiles grammars for one tokenizer."""

    def request(self, grammar: Grammar, vocab_size: int) -> "Future[CompiledGrammar]":
        """Compile, on other threads, what is not compiled yet.

        Each call has a future of its own: one that is cancelled waits no longer, and what nobody waits for is not
        compiled.

        The future's error is an InvalidRequestError, that names the request's field, where the grammar is none or takes
        more time or memory than it may.

        Args:
            vocab_size: the model's.
        """
        ...

    def close(self) -> None:
        """End what compiles."""
        ...
