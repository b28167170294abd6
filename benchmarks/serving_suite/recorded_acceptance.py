"""The draft tokens that would be kept at each place of kimi-nano's texts: requests run with k at random."""

import random
import threading
from collections.abc import Sequence

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.spec_decode.acceptance import AcceptancePool
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.policy import FixedPolicy
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import GenerateRequest, SamplingParams
from serving_suite.side_by_side import NANO, PROMPTS

NUM_TEXTS, NUM_TOKENS, NUM_RUNS = 12, 160, 5


class RandomPolicy(FixedPolicy):
    """Each round another k; notes what came of it."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.verifies: list[tuple[int, int]] = []
        """(draft tokens, those that were kept) of each verify."""

    def admit(self, controller: SpeculationController, running: list[SpeculationController], *_: int) -> None:
        policy = self

        class Notes(AcceptancePool):
            def record(self, num_draft_tokens: int, num_accepted: int) -> None:
                policy.verifies.append((num_draft_tokens, num_accepted))

        controller.pool = Notes()

    def begin_round(self, controllers: list[SpeculationController], *_: int) -> None:
        self.num_chosen_tokens = 7
        for controller in controllers:
            controller.num_chosen_tokens = self._rng.choice((1, 2, 3, 5, 7, 7))


def recorded_texts(temperatures: Sequence[float]) -> list[list[list[int]]]:
    """[T][texts][places] draft tokens that would be kept there, as far as any run saw."""
    settings = ServingSettings(
        checkpoint=str(NANO), draft=str(NANO / "draft"), device="cpu", max_model_len=1024, speculation_policy="fixed"
    )
    target, draft = load_pair(settings)
    tokenizer = load_tokenizer(str(NANO))
    policy = RandomPolicy(random.Random(0))
    engine = Engine(
        target, draft, settings=scheduler_settings(settings), eos_token_ids=tokenizer.eos_token_ids, tokenizer=tokenizer
    )
    engine.start()
    engine.wait_until_ready(60)
    assert engine._loop.core is not None
    engine._loop.core.scheduler.policy = policy
    prompts = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
    found = []
    for temperature in temperatures:
        texts: list[list[int]] = []
        for seed in range(NUM_TEXTS):
            runs = []
            for _ in range(NUM_RUNS):
                policy.verifies = []
                _generate(engine, prompts[seed % len(prompts)], temperature, seed)
                runs.append(policy.verifies)
            texts.append(kept_by_place(runs))
        found.append(texts)
    engine.stop()
    return found


def _generate(engine: Engine, prompt: tuple[int, ...], temperature: float, seed: int) -> None:
    done = threading.Event()
    request = GenerateRequest(
        request_id=str(seed),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=seed, ignore_eos=True),
        num_speculative_tokens=7,
    )
    engine.submit(request, lambda delta: done.set() if delta.finish_reason is not None else None)
    done.wait()


def kept_by_place(runs: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Merge runs over one text: how many draft tokens are kept at each place.

    Who keeps a of k at a place keeps a - 1 at the next one at least; a rejected token says how many exactly.
    """
    least, exact = dict[int, int](), dict[int, int]()
    for verifies in runs:
        place = 0
        for count, kept in verifies:
            if kept < count:
                exact[place] = kept
            for ahead in range(kept + 1):
                least[place + ahead] = max(least.get(place + ahead, 0), kept - ahead)
            place += kept + 1
    return [exact.get(place, least.get(place, 0)) for place in range(max(least, default=-1) + 1)]
