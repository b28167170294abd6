"""Everything that docker/ names exists: settings, paths, ports, flags, models, metrics. No docker engine is needed."""

import dataclasses
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from kimi_backend.cli.main import app
from kimi_backend.cli.openai_endpoint import (
    ACCESS_LOG_VARIABLE,
    API_KEY_VARIABLE,
    LOG_FORMAT_VARIABLE,
    NAMES_VARIABLE,
    OTLP_VARIABLE,
)
from kimi_backend.config.removed_settings import FORMER_NAMES, REMOVED_SETTINGS
from kimi_backend.config.settings import ENVIRONMENT_PREFIX, ServingSettings
from kimi_backend.hosting.drain import LAST_RESPONSES_S
from kimi_backend.hosting.embedded_server import CALL_THREADS, MODELS
from kimi_backend.hosting.server_installation import find_installation
from kimi_backend.serving.metric_table import METRICS
from kimi_openai.observing import EndpointMetrics
from support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
HADOLINT = Path(sys.executable).parent / "hadolint"
PROFILES = ("cpu-demo", "gpu", "monitoring", "openai")
SETTINGS = {ENVIRONMENT_PREFIX + f.name.upper() for f in dataclasses.fields(ServingSettings)}
REMOVED = {ENVIRONMENT_PREFIX + name.upper() for name in (*FORMER_NAMES.values(), *REMOVED_SETTINGS)}
"""Handed on, so that one that is given is refused."""
SET_BY_COMPOSE = {"KIMI_CHECKPOINT", "KIMI_DRAFT", "KIMI_DEVICE"}
SET_BY_THE_START_SCRIPT = {"KIMI_DRAIN_FILE"}
NOT_OFFERED = {"KIMI_TOKENIZER"}
"""The checkpoint's own; a folder elsewhere would need a mount of its own."""


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def start_script():
    return (DOCKER / "start.sh").read_text()


def example_variables():
    lines = (DOCKER / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def substituted(text):
    """Names that a compose file substitutes, with the default at the first place of each."""
    return dict(reversed(re.findall(r"\$\{(\w+)(?::-((?:\$\{[^}]*\}|[^}])*))?\}", text)))


def servers(compose):
    return {name: service for name, service in compose["services"].items() if name.startswith("kimi-")}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_profile_parses(profile):
    command = ["docker-compose", "-f", "compose.yaml", "--env-file", ".env.example", "--profile", profile, "config"]
    done = subprocess.run(command, cwd=DOCKER, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is not installed")
def test_dockerfile_passes_hadolint():
    done = subprocess.run([HADOLINT, DOCKER / "Dockerfile"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "")


def test_profiles_have_their_services(compose):
    profiles = {profile: [] for profile in PROFILES}
    for name, service in compose["services"].items():
        for profile in service["profiles"]:
            profiles[profile].append(name)
    assert profiles == {
        "cpu-demo": ["kimi-cpu"],
        "gpu": ["kimi-gpu"],
        "monitoring": ["prometheus", "grafana"],
        "openai": ["openai"],
    }


def test_every_substituted_variable_is_in_the_example_with_the_same_default():
    used = substituted((DOCKER / "compose.yaml").read_text())
    example = example_variables()
    assert set(used) - REMOVED == set(example)
    for name, default in used.items():
        if name not in REMOVED and not default.startswith("./set-"):
            assert example[name] == default, name


def test_every_setting_can_be_set(compose):
    for name, service in servers(compose).items():
        given = {variable for variable in service["environment"] if variable in SETTINGS}
        assert given == SETTINGS - SET_BY_THE_START_SCRIPT - NOT_OFFERED, name
        assert set(service["environment"]) >= SET_BY_COMPOSE


def test_every_removed_setting_is_handed_on(compose):
    for service in servers(compose).values():
        assert set(service["environment"]) >= REMOVED


def test_every_variable_means_something(compose, start_script):
    known = SETTINGS | REMOVED | set(re.findall(r"\$\{?(KIMI_\w+)", start_script))
    for service in servers(compose).values():
        unknown = {v for v in service["environment"] if v.startswith("KIMI_")} - known
        assert not unknown
    documented = set(re.findall(r"KIMI_\w+", start_script.split("set -euo")[0])) - {"KIMI_"}
    own = set(re.findall(r"\$\{(KIMI_\w+)", start_script)) - SETTINGS
    assert documented - SETTINGS == own, "start.sh lists its own variables at its top"


def test_every_path_that_is_mounted_or_copied_exists(compose):
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            default = substituted(source)
            if default:
                (source,) = default.values()
            if source.startswith("./set-"):
                continue
            if source == "../demo/kimi-nano":
                assert '"demo" / "kimi-nano"' in (ROOT / "backend/kimi_backend/cli/demo.py").read_text()
            elif source.startswith("."):
                assert (DOCKER / source).exists(), source
            else:
                assert source in compose["volumes"], source
    for line in re.findall(r"^COPY (?!--from)(.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            ignored = (DOCKER / "Dockerfile.dockerignore").read_text()
            assert f"!{source}\n" in ignored, f"{source} does not reach the builder"


def test_weights_and_models_cannot_be_written(compose):
    for name, service in servers(compose).items():
        assert service["read_only"] is True, name
        for volume in service["volumes"]:
            if isinstance(volume, dict):
                assert volume["read_only"] is True
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^USER 1000", dockerfile, re.MULTILINE)
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE)
    assert not any("demo" in source or "safetensors" in source for source in copied), "no weights in the image"


def test_ports_are_the_servers(compose, start_script):
    for name, port in (("HTTP", "8000"), ("GRPC", "8001"), ("METRICS", "8002")):
        assert f"${{KIMI_{name}_PORT:-{port}}}" in start_script
        for service in servers(compose).values():
            assert any(mapping.endswith(f":{port}") for mapping in service["ports"])
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert "EXPOSE 8000 8001 8002" in dockerfile
    prometheus = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["kimi:8002"]
    assert all(s["networks"]["default"]["aliases"] == ["kimi"] for s in servers(compose).values())


def test_health_checks_run_a_command_that_exists(compose):
    commands = {command.name for command in app.registered_commands}
    for service in servers(compose).values():
        test = service["healthcheck"]["test"]
        assert test[:2] == ["CMD", "kimi"]
        assert test[2] in commands
    assert 'CMD ["kimi", "health"]' in (DOCKER / "Dockerfile").read_text()


def test_the_openai_endpoint_finds_the_server_and_needs_no_more_than_its_extra(compose):
    service = compose["services"]["openai"]
    dockerfile = (DOCKER / "Dockerfile").read_text()
    stage = dockerfile.split(f" AS {service['build']['target']}\n")[1].split("\nFROM ")[0]
    assert "[openai,telemetry]" in stage
    assert re.search(r"^USER 1000", stage, re.MULTILINE)
    entry, command = (
        json.loads(re.search(rf"^{word} (.*)$", stage, re.MULTILINE)[1]) for word in ("ENTRYPOINT", "CMD")
    )
    assert (entry[:2], command) == (["kimi", "openai"], ["--url=kimi:8001"])
    options = {option for p in typer.main.get_command(app).commands["openai"].params for option in p.opts}
    assert {word.split("=")[0] for word in (*entry[2:], *command)} <= options
    assert service["ports"][0].endswith(":9000")
    assert "--port=9000" in entry
    assert set(service["environment"]) == {
        API_KEY_VARIABLE,
        NAMES_VARIABLE,
        ACCESS_LOG_VARIABLE,
        LOG_FORMAT_VARIABLE,
        OTLP_VARIABLE,
        "KIMI_DRAIN_TIMEOUT_S",
    }
    assert dockerfile.rindex("\nFROM ") > dockerfile.index(stage), "the server's image stays the last, the default"


def test_stopping_takes_less_time_than_it_is_given(compose):
    exit_timeout_s = int(example_variables()["KIMI_EXIT_TIMEOUT_S"])
    drain_s = ServingSettings().drain_timeout_s
    grace_s = int(example_variables()["KIMI_STOP_GRACE_PERIOD"].removesuffix("s"))
    assert grace_s > exit_timeout_s + drain_s + LAST_RESPONSES_S
    for service in servers(compose).values():
        assert service["stop_grace_period"] == f"${{KIMI_STOP_GRACE_PERIOD:-{grace_s}s}}"


def test_all_models_and_their_threads_are_named(start_script):
    alone, drafting, unary = (set(names.split()) for names in re.findall(r"models\+?=\((.*?)\)", start_script))
    assert drafting | unary == set(MODELS)
    assert alone == set(MODELS) - {"eagle3_draft"} - unary
    assert f"thread-pool-size={CALL_THREADS}" in start_script
    for name in MODELS:
        assert (ROOT / "model_repository" / name / "config.pbtxt").exists()


@pytest.mark.server
def test_every_flag_is_one_of_the_servers(start_script):
    libraries = ":".join(map(str, find_installation().library_folders))
    done = subprocess.run(
        [find_installation().binary, "--help"],
        env={"LD_LIBRARY_PATH": libraries},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    offered = set(re.findall(r"--[a-z][a-z-]+", done.stdout + done.stderr))
    block = start_script.split("command=(")[1].split("is_stopping=")[0]
    used = set(re.findall(r"--[a-z][a-z-]+", block)) | {"--load-model"}
    asked_for = set(re.findall(r"\$known == \*(--[a-z-]+)\*", block))  # of newer servers
    assert used - asked_for <= offered, used - offered


def test_constraints_cover_what_the_wheel_needs():
    pinned = {line.split("==")[0] for line in (DOCKER / "constraints.txt").read_text().splitlines() if "==" in line}
    needed = [
        r for r in importlib.metadata.requires("kimi-spec-serving") if re.search(r"extra == .(server|client|openai)", r)
    ]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
    assert len(names) > 5
    assert names - {"torch"} <= pinned, names - pinned


def endpoint_metrics():
    """Names of the endpoint's series, as Prometheus sees them."""
    return {
        name
        for metric in EndpointMetrics().registry.collect()
        for suffix in ("", "_total", "_bucket", "_sum", "_count")
        if (name := metric.name + suffix)
    }


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


@needs_promtool
def test_every_alert_fires_when_it_should_and_not_before(tmp_path):
    """Prometheus' own evaluation of an hour and a half; each case has a series for calm and one for trouble."""
    cases = json.loads((Path(__file__).parent / "alert_cases.json").read_text())
    rules = yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == list(cases)
    tests = []
    for rule, series in zip(rules, cases.values(), strict=True):
        expected = {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
        if rule["alert"] == "KimiDown":
            expected["exp_labels"] = {**rule["labels"], "job": "triton"}
        for trouble, alerts in enumerate(([], [expected])):
            inputs = [{"series": name, "values": values[trouble]} for name, values in series.items()]
            asked = {"eval_time": "80m", "alertname": rule["alert"], "exp_alerts": alerts}
            tests.append({"interval": "1m", "input_series": inputs, "alert_rule_test": [asked]})
    file = tmp_path / "cases.yml"
    file.write_text(json.dumps({"rule_files": [str(DOCKER / "alerts.yml")], "tests": tests}))  # JSON is YAML
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_its_configuration_and_the_alert_rules():
    command = ["promtool", "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=DOCKER, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 rules found" in done.stdout


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads((DOCKER / "grafana/dashboards/kimi.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) >= 12
    histograms = {f"{m.name}_{part}" for m in METRICS if m.observe for part in ("bucket", "sum", "count")}
    published = {m.name for m in METRICS if m.read} | histograms | endpoint_metrics()
    rules = yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"][0]["rules"]
    expressions += [rule["expr"] for rule in rules]
    asked = {name for e in expressions for name in re.findall(r"\b(?:kimi|spec|nv)_\w+", e)}
    assert {name for name in asked if not name.startswith("nv_")} <= published
    documented = (ROOT / "docs/metrics.md").read_text()
    queries = documented.split("## Questions")[1]
    assert set(re.findall(r"\b(?:kimi|spec_decode)_\w+", queries)) <= published
    assert all(target["datasource"]["uid"] == "prometheus" for p in dashboard["panels"] for target in p["targets"])


def test_the_dashboard_is_where_grafana_looks(compose):
    mounts = dict(volume.rsplit(":", 1)[0].split(":") for volume in compose["services"]["grafana"]["volumes"][:2])
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/kimi.yml").read_text())["providers"][0]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"] == "/var/lib/grafana/dashboards"
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["uid"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
