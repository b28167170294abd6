import pytest

from kimi_backend.engine.handshake import check_limits, check_pair, check_runner, check_same_model, resolve
from kimi_backend.errors import ConfigError
from kimi_backend.scheduler.settings import SchedulerSettings
from support.scripted_logits import LogitScript
from support.scripted_models import describe

SCRIPT = LogitScript(32)
TARGET, DRAFT = describe("target", SCRIPT), describe("draft", SCRIPT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol_version": 9}, "target runner: protocol version 9, the engine speaks 1"),
        ({"role": "draft"}, "its role is 'draft', expected 'target'"),
        ({"num_blocks": 31}, r"holds 124 tokens \(31 blocks of 4\), less than one sequence of max_model_len 128"),
    ],
)
def test_a_runner_that_cannot_be_used_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_runner(describe(**({"role": "target", "script": SCRIPT} | changes)), "target")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 8}, "block_size: target 4, draft 8"),
        ({"vocab_size": 40}, "vocab_size: target 32, draft 40"),
        ({"aux_layer_ids": (1, 2, 3)}, r"aux_layer_ids: target \(2, 30, 58\), draft \(1, 2, 3\)"),
        ({"hidden_size": 7}, "hidden_size: target 64, draft 7"),
        ({"draft_vocab_size": 99}, "draft_vocab_size 99 above the target's vocab_size 32"),
        ({"max_model_len": 64}, "max_model_len: target 128, draft 64"),
        ({"block_size": 8, "hidden_size": 7}, "block_size: target 4, draft 8; hidden_size: target 64, draft 7"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_both_values(changes: dict[str, object], message: str) -> None:
    check_pair(TARGET, DRAFT)
    with pytest.raises(ConfigError, match=message):
        check_pair(TARGET, describe("draft", SCRIPT, **changes))


def test_a_runner_that_comes_back_as_another_model_is_refused() -> None:
    check_same_model(TARGET, describe("target", SCRIPT, runner_epoch=2, num_blocks=64))
    with pytest.raises(ConfigError, match="came back as another model: vocab_size: 32 before, 64 now"):
        check_same_model(TARGET, describe("target", SCRIPT, vocab_size=64))
    with pytest.raises(ConfigError, match=r"max_num_seqs: 512 before, less now \(8\)"):
        check_same_model(TARGET, describe("target", SCRIPT, max_num_seqs=8))


def test_a_draft_that_comes_late_must_take_the_steps_that_are_made() -> None:
    settings = SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=2048)
    check_limits(DRAFT, settings)
    with pytest.raises(ConfigError, match="draft runner: max_num_seqs 8, the engine makes steps of up to 64"):
        check_limits(describe("draft", SCRIPT, max_num_seqs=8), settings)


def test_the_tightest_limit_holds() -> None:
    settings = SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=2048)
    small_draft = describe("draft", SCRIPT, max_num_batched_tokens=24, max_num_seqs=50)
    assert resolve(TARGET, DRAFT, settings).settings == settings
    lowered = resolve(TARGET, small_draft, settings)
    assert (lowered.settings.max_num_seqs, lowered.settings.max_num_batched_tokens) == (24, 24)
    assert (lowered.num_target_blocks, lowered.num_draft_blocks) == (256, 256)
    assert resolve(TARGET, None, settings).num_draft_blocks is None
