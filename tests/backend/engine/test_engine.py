"""The engine with its threads: every request ends exactly once, on every path."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kimi_backend.engine.engine import Engine
from kimi_backend.engine.loop import EngineLoop, Patience
from kimi_backend.engine.statistics import EngineState
from kimi_backend.errors import CapacityError, InvalidRequestError, ModelUnavailableError
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from support.plain_decoding import decode_plainly
from support.scripted_models import describe
from support.sequences import make_sequence
from support.threaded_engine import (
    SCRIPT,
    VOCAB,
    Client,
    SlowTarget,
    make_draft,
    make_target,
    ready,
    request,
    started_engines,
)
from support.waiting import PATIENCE_S, wait_for


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    with started_engines() as make:
        yield make


def test_requests_from_many_threads_get_their_own_tokens(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft()))
    requests = [request((i % VOCAB, 5), f"r{i}", seed=i, max_tokens=1 + i) for i in range(24)]
    clients = [Client() for _ in requests]
    threads = [threading.Thread(target=engine.submit, args=pair) for pair in zip(requests, clients, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finals = [client.wait() for client in clients]
    expected = decode_plainly(SCRIPT, requests, eos_token_ids=frozenset(), max_model_len=128)
    assert [client.token_ids for client in clients] == expected
    for final, tokens in zip(finals, expected, strict=True):
        assert final.finish_reason is FinishReason.LENGTH
        assert final.stats is not None
        assert final.stats.num_output_tokens == len(tokens)
        assert final.stats.first_token_time_s is not None
        assert 0 <= final.stats.queue_time_s <= final.stats.first_token_time_s <= final.stats.total_time_s


@pytest.mark.parametrize(("asked", "said"), [(5, 5), (1000, 125), (None, 125)])
def test_what_is_cut_at_the_longest_sequence_is_said(
    start: Callable[..., Engine], asked: int | None, said: int
) -> None:
    engine, client = ready(start(make_target(), make_draft())), Client()
    engine.submit(request((1, 2, 3), max_tokens=asked), client)
    stats = client.wait().stats
    assert stats is not None
    assert (stats.max_tokens, stats.num_output_tokens) == (said, said)


def test_statistics_count_what_left_the_engine(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft()))
    clients = [Client() for _ in range(3)]
    for client in clients:
        engine.submit(request(tuple(range(9))), client)
        client.wait()
    assert engine.drain(PATIENCE_S)
    totals = engine.statistics().totals
    assert totals.num_finished == {FinishReason.LENGTH: 3}
    assert totals.num_prompt_tokens == 27
    assert totals.num_cached_tokens == 16
    assert totals.num_output_tokens == sum(len(c.token_ids) for c in clients) == 60
    stats = [c.deltas[-1].stats for c in clients]
    assert totals.speculation is not None
    assert totals.speculation.num_spec_steps == sum(s.speculation.num_spec_steps for s in stats if s and s.speculation)


def test_origins_add_up_to_the_statistics(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft()))
    requests = [replace(request((i, 5), f"r{i}", seed=i), return_token_origins=True) for i in range(8)]
    clients = [Client() for _ in requests]
    for asked, client in zip(requests, clients, strict=True):
        engine.submit(asked, client)
    for client in clients:
        stats = client.wait().stats
        assert stats is not None
        assert stats.speculation is not None
        per_step = [[int(origin) for origin in delta.token_origins] for delta in client.deltas if delta.token_ids]
        assert all(len(d.token_origins) == len(d.token_ids) for d in client.deltas)
        assert per_step[0] == [0], "nobody guesses the first token"
        assert all(step == sorted(step, reverse=True) for step in per_step), "the target's own token comes last"
        assert all(sum(step) in (len(step), len(step) - 1) for step in per_step)
        cut = stats.speculation.num_accepted_draft_tokens - sum(map(sum, per_step))
        assert 0 <= cut <= 2, "only what the last step's limit cut off is missing"
        assert sum(map(sum, per_step)) > 0


def test_no_speculation_statistics_without_speculation(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target()))
    client = Client()
    engine.submit(request(), client)
    final = client.wait()
    assert final.stats is not None
    assert final.stats.speculation is None


def test_a_seed_is_picked_and_reported(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft()))
    first, second = Client(), Client()
    handle = engine.submit(request(seed=None, temperature=1.5), first)
    final = first.wait()
    assert final.stats is not None
    assert final.stats.seed == handle.seed
    engine.submit(request(seed=handle.seed, temperature=1.5), second)
    second.wait()
    assert first.token_ids == second.token_ids


def test_a_wrong_request_is_refused_at_once(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target()))
    with pytest.raises(InvalidRequestError, match=r"temperature: -1 given"):
        engine.submit(request(temperature=-1), Client())
    with pytest.raises(InvalidRequestError, match="stop: 1 strings given, none is allowed without a tokenizer"):
        engine.submit(request(stop=("x",)), Client())


def test_a_full_queue_refuses(start: Callable[..., Engine]) -> None:
    target = make_target()
    target.gate = threading.Event()
    engine = ready(start(target, settings=SchedulerSettings(max_num_seqs=1, max_queue_size=2)))
    clients = [Client() for _ in range(3)]
    engine.submit(request(), clients[0])
    wait_for(lambda: engine.statistics().num_running == 1)
    engine.submit(request(), clients[1])
    engine.submit(request(), clients[2])
    with pytest.raises(CapacityError, match="2 requests are waiting, at most 2 may"):
        engine.submit(request(), Client())
    target.gate.set()
    for client in clients:
        assert client.wait().finish_reason is FinishReason.LENGTH


def test_requests_before_the_runners_are_ready_are_told_which_is_loading(start: Callable[..., Engine]) -> None:
    target, draft = make_target(), make_draft()
    draft.unavailable = True
    engine = start(target, draft)
    wait_for(lambda: "draft" in (engine.statistics().problem or ""))
    with pytest.raises(ModelUnavailableError, match="runner draft is loading"):
        engine.submit(request(), Client())
    assert engine.statistics().state is EngineState.STARTING
    draft.unavailable = False
    client = Client()
    ready(engine).submit(request(), client)
    assert client.wait().finish_reason is FinishReason.LENGTH


def test_a_draft_that_never_comes_does_not_keep_the_engine_from_serving(start: Callable[..., Engine]) -> None:
    draft = make_draft()
    draft.unavailable = True
    engine = ready(start(make_target(), draft, patience=Patience(draft_s=0.0)))
    client = Client()
    engine.submit(request(), client)
    final = client.wait()
    assert final.finish_reason is FinishReason.LENGTH
    assert final.stats is not None
    assert final.stats.speculation is None
    assert not engine.statistics().is_speculating


def test_a_pair_that_does_not_fit_is_refused_with_both_values(start: Callable[..., Engine]) -> None:
    engine = start(make_target(), make_draft(block_size=8, aux_layer_ids=(1, 29, 57)))
    with pytest.raises(ModelUnavailableError, match=r"block_size: target 4, draft 8; aux_layer_ids: .*\(1, 29, 57\)"):
        engine.wait_until_ready(PATIENCE_S)


def test_cancellation_ends_a_running_request(start: Callable[..., Engine]) -> None:
    target = make_target()
    engine = ready(start(target, make_draft()))
    client = Client()
    target.gate, target.num_free_steps = threading.Event(), 6
    handle = engine.submit(request(max_tokens=100), client)
    assert target.is_held.wait(PATIENCE_S)
    num_steps = target.num_steps
    handle.cancel()
    target.gate.set()
    final = client.wait()
    assert target.num_steps <= num_steps + 2, "the one that was held, and one more"
    assert final.finish_reason is FinishReason.CANCELLED
    assert final.error == "cancelled by the client"
    assert len(client.token_ids) < 100
    wait_for(lambda: engine.statistics().num_running == 0)
    handle.cancel()


def test_cancellation_is_noticed_while_the_target_is_away(start: Callable[..., Engine]) -> None:
    target = make_target()
    engine = ready(start(target))
    target.gate = threading.Event()
    client = Client()
    handle = engine.submit(request(), client)
    target.unavailable = True
    target.gate.set()
    wait_for(lambda: "gone" in (engine.statistics().problem or ""))
    handle.cancel("tired of waiting")
    assert client.wait().error == "tired of waiting"


def test_cancellation_ends_a_waiting_request(start: Callable[..., Engine]) -> None:
    target = make_target()
    target.gate = threading.Event()
    engine = ready(start(target, settings=SchedulerSettings(max_num_seqs=1)))
    first, second, third = Client(), Client(), Client()
    engine.submit(request(max_tokens=30), first)
    handle = engine.submit(request(), second)
    engine.submit(request(), third)
    handle.cancel()
    target.gate.set()
    assert second.wait().finish_reason is FinishReason.CANCELLED
    assert second.token_ids == []
    assert first.wait().finish_reason is FinishReason.LENGTH
    assert third.wait().finish_reason is FinishReason.LENGTH


def test_a_deadline_cancels(start: Callable[..., Engine]) -> None:
    target = make_target()
    target.step_s = 0.02
    engine = ready(start(target))
    client = Client()
    late = GenerateRequest(
        request_id="late", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=100), timeout_s=0.1
    )
    engine.submit(late, client)
    final = client.wait()
    assert final.finish_reason is FinishReason.CANCELLED
    assert final.error == "its deadline of 0.1 s has passed"
    assert final.stats is not None
    assert final.stats.total_time_s >= 0.1


def test_drain_lets_live_requests_end_and_takes_no_more(start: Callable[..., Engine]) -> None:
    target = make_target()
    target.step_s = 0.005
    engine = ready(start(target, make_draft()))
    client = Client()
    engine.submit(request(), client)
    assert engine.drain(PATIENCE_S)
    assert client.wait().finish_reason is FinishReason.LENGTH
    with pytest.raises(CapacityError, match="shutting down"):
        engine.submit(request(), Client())


def test_stop_cancels_what_is_live(start: Callable[..., Engine]) -> None:
    target = make_target()
    target.step_s = 0.05
    engine = ready(start(target, settings=SchedulerSettings(max_num_seqs=1)))
    running, waiting = Client(), Client()
    engine.submit(request(max_tokens=100), running)
    engine.submit(request(max_tokens=100), waiting)
    wait_for(lambda: bool(running.deltas))
    engine.stop()
    for client in (running, waiting):
        final = client.wait(0)
        assert final.finish_reason is FinishReason.CANCELLED
        assert final.error == "the server is shutting down; send the request again"
    engine.stop()


def test_stop_gives_out_what_a_round_held_back(start: Callable[..., Engine]) -> None:
    """Outputs of a round whose draft overlaps wait for the next step, which never comes."""
    target = make_target()
    target.step_s = 0.05
    engine = ready(start(target, make_draft()))
    client = Client()
    engine.submit(replace(request(max_tokens=400, ignore_eos=True), num_speculative_tokens=3), client)
    wait_for(lambda: len(client.deltas) > 2)
    assert engine._loop.core is not None
    (sequence,) = engine._loop.core.scheduler.running
    engine.stop()
    assert client.wait(0).finish_reason is FinishReason.CANCELLED
    assert len(client.token_ids) == sequence.num_tokens - len(request().prompt_token_ids)


def test_a_failing_engine_ends_every_request_with_an_error(start: Callable[..., Engine]) -> None:
    class BrokenTarget(SlowTarget):
        def _begin_step(self) -> None:
            if self.num_steps == 3:
                raise RuntimeError("a bug")
            super()._begin_step()

    engine = ready(start(BrokenTarget(describe("target", SCRIPT), SCRIPT), settings=SchedulerSettings(max_num_seqs=1)))
    running, waiting = Client(), Client()
    engine.submit(request(), running)
    engine.submit(request(), waiting)
    for client in (running, waiting):
        final = client.wait()
        assert final.finish_reason is FinishReason.ERROR
        assert final.error == "the engine failed: RuntimeError: a bug"
    with pytest.raises(ModelUnavailableError, match="the engine has stopped: RuntimeError: a bug"):
        engine.submit(request(), Client())


def test_a_target_that_stays_away_ends_its_requests(start: Callable[..., Engine]) -> None:
    target = make_target()
    engine = ready(start(target, patience=Patience(target_s=0.2)))
    client = Client()
    target.gate = threading.Event()
    engine.submit(request(), client)
    target.unavailable = True
    target.gate.set()
    final = client.wait()
    assert final.finish_reason is FinishReason.ERROR
    assert final.error is not None
    assert "runner target" in final.error
    with pytest.raises(ModelUnavailableError, match="runner target"):
        engine.submit(request(), Client())
    target.unavailable = False
    target.restart()
    wait_for(lambda: engine.statistics().problem is None)
    again = Client()
    engine.submit(request(), again)
    assert again.wait().finish_reason is FinishReason.LENGTH


def test_a_broken_sink_cancels_its_request_and_no_other(start: Callable[..., Engine]) -> None:
    engine = ready(start(make_target(), make_draft()))
    good = Client()

    def broken(delta: TokenDelta) -> None:
        raise RuntimeError("the connection is gone")

    engine.submit(request(max_tokens=100), broken)
    engine.submit(request(max_tokens=40), good)
    assert good.wait().finish_reason is FinishReason.LENGTH
    wait_for(lambda: engine.statistics().num_running == 0)


def test_requests_end_while_the_engine_waits_for_a_dead_target(start: Callable[..., Engine]) -> None:
    """And the engine serves others once the call has come back, without what ended."""
    target = make_target()
    engine = ready(start(target, make_draft()))
    target.gate = threading.Event()
    stuck = [Client() for _ in range(3)]
    for i, client in enumerate(stuck):
        engine.submit(request((i, 1), f"stuck{i}", max_tokens=100), client)
    assert target.is_held.wait(PATIENCE_S)
    engine.fail_live("its process has died")
    for client in stuck:
        final = client.wait()
        assert (final.finish_reason, final.error) == (FinishReason.ERROR, "its process has died")
    target.gate.set()
    later = Client()
    engine.submit(request(max_tokens=1), later)
    assert later.wait().finish_reason is FinishReason.LENGTH
    wait_for(lambda: engine.statistics().num_running == 0)
    assert engine.statistics().num_steps < 10, "those that ended went on"


def test_processes_that_runners_have_are_told_and_a_dead_one_ends_speculation(start: Callable[..., Engine]) -> None:
    draft = make_draft(process_id=7)
    engine = ready(start(make_target(process_id=6), draft))
    assert (engine.target_process_id, engine.draft_process_id, engine.max_prompt_tokens) == (6, 7, 127)
    engine.report_dead_draft(6)
    draft.unavailable = True
    engine.report_dead_draft(7)
    wait_for(lambda: not engine.statistics().is_speculating)
    assert "its process 7 has died" in (engine.statistics().problem or "")
    alone = ready(start(make_target()))
    assert (alone.target_process_id, alone.draft_process_id) == (None, None)
    alone.report_dead_draft(7)


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    loop = EngineLoop(make_target(), None, SchedulerSettings(), Patience())
    live, rng = [], random.Random(1)
    for uid in range(400):
        sequence = make_sequence(uid=uid)
        if uid % 20 == 10:
            live.append(sequence)
        else:
            sequence.finish = Finish(FinishReason.LENGTH)
        loop._watch_deadline(sequence, rng.random())
        assert len(loop._deadlines) <= 65
        assert loop._deadlines[0] == min(loop._deadlines)
    assert {entry[2] for entry in loop._deadlines} >= set(live)
