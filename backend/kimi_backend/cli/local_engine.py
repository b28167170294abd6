"""The engine and both models in this process, for commands that need no server."""

from collections.abc import Iterator
from contextlib import contextmanager

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.text.tokenizer import Tokenizer

READY_TIMEOUT_S = 60.0


@contextmanager
def local_engine(settings: ServingSettings, tokenizer: Tokenizer) -> Iterator[Engine]:
    """Load the models, start an engine over them, and stop it at the end.

    Raises:
        ConfigError, CheckpointError: the settings or files cannot be served.
    """
    from kimi_backend.runners.load.loading import load_pair

    target, draft = load_pair(settings)
    engine = Engine(
        target,
        draft,
        settings=scheduler_settings(settings),
        eos_token_ids=tokenizer.eos_token_ids,
        tokenizer=tokenizer,
    )
    engine.start()
    try:
        engine.wait_until_ready(READY_TIMEOUT_S)
        yield engine
    finally:
        engine.stop()
        target.close()
