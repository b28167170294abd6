"""benchmarks/serving.py against the real server, with the real perf_analyzer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_backend.cli.perf_analyzer import find_perf_analyzer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def perf_analyzer():
    if find_perf_analyzer() is None:
        subprocess.run([ROOT / "scripts/get_perf_analyzer.sh"], check=True, capture_output=True)


def run_suite(suite, url, out, *options):
    pytest.importorskip("matplotlib")
    command = [sys.executable, ROOT / "benchmarks/serving.py", suite, "--url", url, "--out", out, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.with_suffix(".png").exists()
    return json.loads(out.read_text())


def test_shared_prefixes_are_found_in_the_cache(perf_analyzer, url, tmp_path):
    options = ("--requests", "4", "--max-tokens", "6", "--prefix-characters", "600")
    report = run_suite("shared-prefix", url, tmp_path / "report.json", *options)
    shared, salted = report["cases"]
    assert shared["requests"] == salted["requests"] == 4
    assert shared["errors"] == salted["errors"] == 0
    assert shared["cached_share"] > 0.3
    assert salted["cached_share"] == 0
    assert shared["mean_prompt_tokens"] == salted["mean_prompt_tokens"] > 64


def test_a_rate_is_kept(perf_analyzer, url, tmp_path):
    options = ("--requests", "6", "--max-tokens", "4", "--rates", "3", "-k", "2")
    report = run_suite("rate", url, tmp_path / "report.json", *options)
    assert [case["label"] for case in report["cases"]] == ["k = 2", "plain"]
    assert report["cases"][0]["speculation"]["rounds"] > 0
    assert report["cases"][1]["speculation"] is None
    assert all("--request-rate-range=3:3" in case["perf_analyzer"] for case in report["cases"])
