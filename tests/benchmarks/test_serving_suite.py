"""The serving benchmark's loads and pictures; tests/server/test_serving_benchmark.py runs one for real."""

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from serving_suite.loads import SUITES, LoadSettings  # noqa: E402

SETTINGS = LoadSettings(
    num_speculative_tokens=4, num_requests=6, concurrencies=(1, 8), rates=(0.5, 3.0), prompt_characters=(200, 400)
)


def cases(suite, settings=SETTINGS):
    return list(SUITES[suite](settings))


@pytest.mark.parametrize("suite", ["concurrency", "rate", "long-prompt"])
def test_every_point_is_measured_with_speculation_and_without(suite):
    points = {}
    for case in cases(suite):
        points.setdefault(case.x, {})[case.label] = {r["num_speculative_tokens"] for r in case.requests}
    assert len(points) == 2
    assert all(labels == {"k = 4": {4}, "plain": {0}} for labels in points.values())


def test_many_streams_get_several_requests_each():
    assert [len(case.requests) for case in cases("concurrency")] == [6, 6, 32, 32]
    assert cases("concurrency")[-1].arguments == ["--concurrency-range=8"]


def test_rates_are_poisson():
    assert cases("rate")[0].arguments == ["--request-rate-range=0.5:0.5", "--request-distribution=poisson"]


def test_long_prompts_are_all_different_and_share_no_cache_between_the_lines():
    for case in cases("long-prompt"):
        prompts = [r["text_input"] for r in case.requests]
        assert len(set(prompts)) == len(prompts)
        assert {len(prompt) for prompt in prompts} == {case.x}
        assert {r["cache_salt"] for r in case.requests} == {case.label}


def test_prefixes_are_shared_or_salted_apart():
    shared, salted = cases("shared-prefix")
    beginnings = {r["text_input"][: SETTINGS.prefix_characters] for r in shared.requests + salted.requests}
    assert len(beginnings) == 1
    assert all("cache_salt" not in r for r in shared.requests)
    assert len({r["cache_salt"] for r in salted.requests}) == len(salted.requests)


@pytest.mark.parametrize("suite", list(SUITES))
def test_both_lines_ask_for_the_same_work(suite):
    by_label = {}
    for case in cases(suite):
        work = [(r["text_input"], r["max_tokens"], r["seed"], r["temperature"]) for r in case.requests]
        by_label.setdefault(case.label, []).append((case.x, work))
    first, second = by_label.values()
    assert first == second


def measured(case, speed):
    milliseconds = {"p50": 10.0 / speed, "p90": 15.0 / speed, "p99": 20.0 / speed}
    is_plain = case.label == "plain"
    return {
        "label": case.label,
        "x": case.x,
        "output_tokens_per_second": 100 * speed,
        "first_token_ms": milliseconds,
        "inter_token_ms": milliseconds,
        "request_ms": milliseconds,
        "speculation": None if is_plain else {"acceptance_per_position": [0.8, 0.6, 0.4, None]},
        "mean_prompt_tokens": case.x / 3,
        "cached_share": 0.5,
    }


@pytest.mark.parametrize("suite", list(SUITES))
def test_a_report_becomes_a_picture(suite, tmp_path):
    pytest.importorskip("matplotlib")
    from serving_suite.plots import draw

    report = {"suite": suite, "what": "a test", "cases": [measured(c, 1.5 + c.x % 2) for c in cases(suite)]}
    draw(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 5000


def test_settings_are_the_commands_options():
    import serving

    options = serving.parse_arguments(["rate", "-k", "7", "--rates", "1,2.5", "--requests", "3", "--url", "x:1"])
    settings = serving.load_settings(options)
    assert settings == dataclasses.replace(LoadSettings(), num_speculative_tokens=7, rates=(1, 2.5), num_requests=3)
