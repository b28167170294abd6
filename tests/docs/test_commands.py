"""Every command that README and docs tell a reader to run: what runs it, or why nothing here can."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.documented_commands import DocumentedCommand, all_commands
from support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/docs/test_commands.py"
ON_A_SERVER = "tests/server/test_documented_commands.py"
GPU = "not here: needs a GPU"
DOCKER = "not here: needs a docker engine; tests/docker parses the files"
LONG = "not here: trains or measures for minutes to hours"
SOAK = "tests/server/test_long_commands.py"

PLACES = (
    (r"make (demo|test|lint)", ".ci/run"),
    (r"(PIP_EXTRA_INDEX_URL=\S+ )?make setup", "tests/scripts/test_choose_torch.py"),
    (r"make test-gpu .*", GPU),
    (r"\.venv/bin/kimi (serve|generate|bench) .*", ON_A_SERVER),
    (r"(\./scripts/get_perf_analyzer\.sh|\.venv/bin/perf_analyzer .*)", ON_A_SERVER),
    (r"curl localhost:(8000|9000)/.*", ON_A_SERVER),
    (r"kimi openai --url localhost:8001 --port 9000", ON_A_SERVER),
    (r"kimi serve --checkpoint PATH .*", ON_A_SERVER),
    (r"kimi serve --checkpoint demo/kimi-nano .*", ON_A_SERVER),
    (
        r"kimi serve --checkpoint /models/\S+ (.* )?--proposer .*",
        "not here: real weights; the setting: tests/backend/config",
    ),
    (r"kimi bench --(prompts|sweep-k|trace) .*", "tests/server/test_commands.py"),
    (r"kimi eval problems\.jsonl .*", "tests/server/test_eval.py"),
    (r"kimi make-checkpoint OUT --preset kimi-k2\.5 .* --no-weights", HERE),
    (r"kimi make-checkpoint OUT --preset tiny\|.*", "tests/backend/cli/test_make_checkpoint.py"),
    (r"kimi serve --checkpoint OUT .* --load-format dummy .*", "tests/backend/runners/test_dummy_loading.py"),
    (r"kimi count-tokens .*", HERE),
    (r"python benchmarks/serving\.py plot .*", HERE),
    (r"python benchmarks/serving\.py .*", "tests/server/test_serving_benchmark.py"),
    (r"(cd docker|cp \.env\.example \.env|docker compose .*)", DOCKER),
    (r"\./smoke\.sh .*", "tests/server/test_start_script.py"),
    (r"KIMI_CHECKPOINT=\S+ KIMI_DRAFT=\S+ docker/start\.sh", "tests/server/test_start_script.py"),
    (r"\./scripts/try_clients\.sh", "not here: installs 1.5 GB of other people's packages; run by hand"),
    (r"python benchmarks/make_trace\.py .*", "tests/benchmarks/test_make_trace.py"),
    (r"python -m venv lm-eval .*|lm-eval/bin/lm_eval .*", "not here: downloads tasks; try_clients.sh runs two of ours"),
    (r"aiperf .*", "not here: a tool of its own, which downloads; run by hand"),
    (
        r"(PYTHONPATH=\S+ )?python benchmarks/(slice|kernels|collectives|draft_cost|real_acceptance|exactness)\.py .*",
        GPU,
    ),
    (r"python benchmarks/cpu_speed\.py .*", SOAK),
    (r"python benchmarks/draft_acceptance\.py .*", LONG),
    (r"make drafts|cp -r demo/kimi-nano .*|(PYTHONPATH=demo )?python -m kimi_nano .*", LONG),
)
"""(pattern of whole commands, the test or script that runs them or its like, or why none can)."""

COMMANDS = all_commands()


def test_there_are_commands_on_the_pages_that_have_them():
    pages = {command.page for command in COMMANDS}
    assert {"README.md", "docs/install.md", "docs/openai.md", "docs/operations.md"} <= pages
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("command", sorted({c.text for c in COMMANDS}))
def test_something_runs_it_or_says_why_not(command):
    places = [place for pattern, place in PLACES if re.fullmatch(pattern, command)]
    assert places, "name what runs it, in PLACES"
    assert places[0].startswith("not here: ") or (ROOT / places[0]).exists()


def test_each_place_is_needed():
    texts = {command.text for command in COMMANDS}
    assert [p for p, _ in PLACES if not any(re.fullmatch(p, text) for text in texts)] == []


def test_make_knows_its_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {m[1] for c in COMMANDS if (m := re.search(r"\bmake ([a-z-]+)", c.text))}
    assert named <= targets


def test_compose_knows_its_profiles():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"].values()
    profiles = {profile for service in services for profile in service.get("profiles", ())}
    named = {name for c in COMMANDS if "docker compose" in c.text for name in re.findall(r"--profile (\S+)", c.text)}
    assert named <= profiles


@pytest.mark.parametrize("command", sorted({c.text for c in COMMANDS if "python benchmarks/" in c.text}))
def test_programs_have_the_options_that_are_named(command):
    """Read off their source, since most need a GPU to start."""
    name = re.search(r"benchmarks/(\w+)\.py", command)[1]
    sources = [ROOT / f"benchmarks/{name}.py", *sorted((ROOT / "benchmarks").glob(f"{name}_suite/*.py"))]
    text = "".join(source.read_text() for source in sources)
    assert [o for o in re.findall(r" (--[a-z][a-z-]*)", command) if f'"{o}"' not in text] == []


@pytest.mark.parametrize("command", sorted({c.text for c in COMMANDS if "-m kimi_nano" in c.text}))
def test_kimi_nano_has_the_commands_and_options_that_are_named(command):
    text = (ROOT / "demo/kimi_nano/__main__.py").read_text()
    name = re.search(r"kimi_nano (\w+)", command)[1]
    assert f'add_parser("{name}"' in text
    assert [o for o in re.findall(r" (--[a-z][a-z-]*)", command) if f'"{o}"' not in text] == []


def run_like(pattern: str, replaced: dict[str, str]) -> None:
    """Run the one documented command that matches, with a reader's own names in place of the page's."""
    (command,) = {c.text for c in COMMANDS if re.fullmatch(pattern, c.text)}
    for name, own in replaced.items():
        assert name in command
        command = command.replace(name, own)
    words = shlex.split(command)
    folder = Path(sys.executable).parent
    words[0] = {"kimi": str(folder / "kimi"), "python": sys.executable}[words[0]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_a_checkpoint_without_weights(tmp_path):
    run_like(r"kimi make-checkpoint OUT .* --no-weights", {"OUT": str(tmp_path / "k")})
    assert (tmp_path / "k/draft/config.json").exists()


def test_counting_tokens(tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"text": "def add(a, b):\\n    return a + b"}\n')
    replaced = {
        "/models/kimi-k2.5-eagle3-mla": str(tmp_path),
        "/models/kimi-k2.5": "demo/kimi-nano",
        "answers.jsonl": str(tmp_path / "answers.jsonl"),
    }
    run_like("kimi count-tokens .*", replaced)
    assert (tmp_path / "token_counts.json").exists()


def test_plotting_a_report(tmp_path):
    report = tmp_path / "rate.json"
    report.write_text((ROOT / "benchmarks/results/serving_rate.json").read_text())
    run_like(r"python benchmarks/serving\.py plot .*", {"FILE.json": str(report)})
    assert report.with_suffix(".png").exists()


def test_a_command_that_nobody_runs_is_found():
    with pytest.raises(AssertionError, match="name what runs it"):
        test_something_runs_it_or_says_why_not(DocumentedCommand("x.md", "kimi frobnicate").text)
