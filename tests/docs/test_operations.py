"""The pages for operators name what exists: variables, settings, metrics, commands, flags, files."""

import dataclasses
import re
from pathlib import Path

import pytest

from kimi_backend.config.settings import ENVIRONMENT_PREFIX, ServingSettings
from kimi_backend.serving.metric_table import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/operations.md", "docs/troubleshooting.md", "docs/metrics.md", "docs/decisions/0010-metrics.md")
SETTINGS = {f.name for f in dataclasses.fields(ServingSettings)}


@pytest.fixture(params=PAGES)
def page(request):
    return ROOT / request.param


def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_paths_exist(page):
    for path in re.findall(r"\b(?:docker|tests|benchmarks|docs|scripts)/[\w./-]+\.\w+", page.read_text()):
        assert (ROOT / path).exists(), path


def test_variables_are_known(page):
    start = (ROOT / "docker/start.sh").read_text()
    example = (ROOT / "docker/.env.example").read_text()
    for name in set(re.findall(r"\bKIMI_[A-Z_]+", page.read_text())):
        is_setting = name.removeprefix(ENVIRONMENT_PREFIX).lower() in SETTINGS
        assert is_setting or name in start or f"\n{name}=" in example, name


def test_metrics_are_published(page):
    published = {m.name for m in METRICS} | {m.vllm_name for m in METRICS}
    parts = {f"{m.name}_{part}" for m in METRICS if m.observe for part in ("bucket", "sum", "count")}
    named = set(
        re.findall(r"\b(?:kimi_(?:requests|kv|prefix|step|prompt|generation|time)|spec_decode)_\w+", page.read_text())
    )
    assert named <= published | parts, named - published - parts
