"""The draft tokens that are kept at each place of kimi-nano's texts: requests run until a verify began at every one."""

import itertools
import threading
from collections.abc import Mapping, Sequence

from kimi_backend.config.settings import ServingSettings
from kimi_backend.engine.engine import Engine
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.serving.spec_ensemble_server import scheduler_settings
from kimi_backend.spec_decode.acceptance import AcceptancePool
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.policy import FixedPolicy
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS, GenerateRequest, SamplingParams
from serving_suite.side_by_side import NANO, PROMPTS

NUM_TEXTS, NUM_TOKENS, MOST_RUNS = 8, 160, 16
MOST = MAX_SPECULATIVE_TOKENS


class EveryPlacePolicy(FixedPolicy):
    """Drafts as much as can be where it is not known yet what is kept there, and nothing elsewhere: a round without a
    draft ends at the next place. One request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_chosen_tokens = MOST
        self.kept: dict[int, int] = {}
        """Draft tokens that are kept, by place in the text."""
        self._place = self._num_under_verification = 0

    def admit(self, controller: SpeculationController, running: list[SpeculationController], *_: int) -> None:
        policy = self

        class Notes(AcceptancePool):
            def record(self, num_draft_tokens: int, num_accepted: int) -> None:
                if num_accepted < num_draft_tokens or num_draft_tokens == MOST:
                    policy.kept[policy._place] = num_accepted
                policy._go_on(controller, num_accepted + 1)

        controller.pool = Notes()
        self._place = 0
        self._go_on(controller, 0)

    def begin_round(self, controllers: list[SpeculationController], *_: int) -> None:
        for controller in controllers:
            if self._num_under_verification:
                controller.num_chosen_tokens = MOST  # room for as many; `record` says what is drafted
            else:
                self._go_on(controller, 1)

    def _go_on(self, controller: SpeculationController, num_tokens: int) -> None:
        self._place += num_tokens
        self._num_under_verification = 0 if self._place in self.kept else MOST
        controller.num_chosen_tokens = self._num_under_verification


def recorded_texts(temperatures: Sequence[float]) -> list[list[list[int]]]:
    """[T][texts][places] draft tokens that are kept there."""
    settings = ServingSettings(
        checkpoint=str(NANO), draft=str(NANO / "draft"), device="cpu", max_model_len=1024, speculation_policy="fixed"
    )
    target, draft = load_pair(settings)
    tokenizer = load_tokenizer(str(NANO))
    policy = EveryPlacePolicy()
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
            policy.kept = {}
            for _ in range(MOST_RUNS):
                _generate(engine, prompts[seed % len(prompts)], temperature, seed)
                if len(known_places(policy.kept)) >= NUM_TOKENS - 1 - MOST:
                    break
            texts.append(known_places(policy.kept))
        found.append(texts)
    engine.stop()
    return found


def _generate(engine: Engine, prompt: tuple[int, ...], temperature: float, seed: int) -> None:
    done = threading.Event()
    request = GenerateRequest(
        request_id=str(seed),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=seed, ignore_eos=True),
        num_speculative_tokens=MOST,
    )
    engine.submit(request, lambda delta: done.set() if delta.finish_reason is not None else None)
    done.wait()


def known_places(kept: Mapping[int, int]) -> list[int]:
    """The numbers kept at each place, up to the first one of which nothing is known."""
    return [kept[place] for place in itertools.takewhile(kept.__contains__, itertools.count())]
