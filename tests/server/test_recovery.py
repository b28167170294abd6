"""Runners that fail, are killed or are reloaded; models unloaded under load."""

import os
import signal

from kimi_client import KimiClientError
from support.server_process import MAX_MODEL_LEN, stub_pids
from support.streams import control, generate_when_back, reload, wait_for_speculation

LONG = {"max_tokens": MAX_MODEL_LEN - 16, "ignore_eos": True, "seed": 1}


def start_streams(client, number):
    streams = [client.stream(text_input=f"tell {i}", **LONG) for i in range(number)]
    for stream in streams:
        next(iter(stream))
    return streams


def ends(streams):
    """Each stream's ending: its finish reason or its error."""
    results = []
    for stream in streams:
        try:
            results.append(stream.result().finish_reason)
        except KimiClientError as error:
            results.append(type(error).__name__)
    return results


def test_a_killed_draft_costs_no_request_and_comes_back(server_to_break, broken_client):
    fields = {"text_input": "tell 0", "max_tokens": 200, "ignore_eos": True, "seed": 1}
    expected = broken_client.generate(**fields, num_speculative_tokens=0).text
    stream = broken_client.stream(**fields)
    next(iter(stream))
    os.kill(stub_pids(server_to_break)["eagle3_draft"], signal.SIGKILL)
    assert stream.result().text == expected
    without = broken_client.generate(**fields)
    assert without.text == expected
    reload(server_to_break, "eagle3_draft")
    wait_for_speculation(broken_client)
    assert broken_client.generate(**fields).text == expected


def test_a_killed_target_ends_every_request_and_comes_back(server_to_break, target_to_break, broken_client):
    fields = {"text_input": "tell 0", "max_tokens": 64, "ignore_eos": True, "seed": 1}
    expected = broken_client.generate(**fields).text
    with target_to_break.slow():
        streams = start_streams(broken_client, 4)
        os.kill(stub_pids(server_to_break)["kimi_target"], signal.SIGKILL)
        assert set(ends(streams)) == {"ServerFailed"}
    reload(server_to_break, "kimi_target")
    assert generate_when_back(broken_client, **fields).text == expected


def test_a_target_that_raises_fails_its_requests_and_serves_again(broken_client, target_to_break):
    fields = {"text_input": "tell 0", "max_tokens": 48, "ignore_eos": True, "seed": 1}
    expected = broken_client.generate(**fields).text
    with target_to_break.slow():
        streams = start_streams(broken_client, 4)
        with target_to_break.raising():
            assert set(ends(streams)) == {"ServerFailed"}
    assert generate_when_back(broken_client, **fields).text == expected


def test_unloading_the_orchestrator_ends_every_stream(server_to_break, broken_client):
    streams = start_streams(broken_client, 8)
    control(server_to_break, "spec_ensemble", "unload")
    assert set(ends(streams)) <= {"RequestCancelled", "length"}
    control(server_to_break, "spec_ensemble", "load")
    assert generate_when_back(broken_client, **{**LONG, "text_input": "x", "max_tokens": 4}).num_output_tokens == 4


def test_an_orchestrator_that_is_loaded_while_another_is_unloaded_has_the_runners_alone(
    server_to_break, target_to_break, broken_client
):
    """The streams of the one that leaves end; neither writes into the other's KV blocks."""
    fields = [{"text_input": f"tell {i}", "max_tokens": 40, "ignore_eos": True, "seed": i} for i in range(8)]
    expected = [broken_client.generate(**one).text for one in fields]
    for _ in range(3):
        with target_to_break.slow():  # there are requests of the one that leaves until the other takes over
            leaving = start_streams(broken_client, 8)
            control(server_to_break, "spec_ensemble", "unload")
            control(server_to_break, "spec_ensemble", "load")
            assert generate_when_back(broken_client, **fields[0]).text == expected[0]
        running = [broken_client.stream(**one) for one in fields]
        assert [stream.result().text for stream in running] == expected
        assert set(ends(leaving)) <= {"RequestCancelled", "length"}
