"""The Helm chart renders, lints, and fits the Kubernetes schemas; needs the extra `chart` (350 MB, not in `dev`)."""

from pathlib import Path

import pytest
import yaml

from kimi_backend.config.known_variables import warnings_of_unknown

helm = pytest.importorskip("helm_python", reason="the extra `chart` is not installed")
schemas = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).resolve().parents[2] / "docker/helm/kimi"
KUBERNETES = "1.31"
EVERYTHING = {
    "models": {"claim": "weights"},
    "serviceMonitor": {"enabled": True},
    "openai": {"keys": "keys", "otlpEndpoint": "http://collector:4318"},
    "adminSecret": "admin",
    "tritonArgs": ["--log-verbose=1"],
    "settings": {"KIMI_MAX_MODEL_LEN": "131072"},
}


def render(values):
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="demo", namespace="prod").values()
    return {document["kind"]: document for text in texts for document in yaml.safe_load_all(text) if document}


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("autoscaling", ["none", "hpa", "keda"])
def test_what_is_rendered_fits_the_schemas(gpus, autoscaling):
    of_size = yaml.safe_load((CHART / f"gpus/{gpus}.yaml").read_text())
    found = render({**of_size, **EVERYTHING, "autoscaling": {"kind": autoscaling}})
    scaler = {"none": set(), "hpa": {"HorizontalPodAutoscaler"}, "keda": {"ScaledObject"}}[autoscaling]
    always = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor"}
    assert set(found) == always | scaler
    for kind, document in found.items():
        if kind not in ("ServiceMonitor", "ScaledObject"):  # of operators, with schemas of their own
            schemas.validate(document, KUBERNETES, strict=True)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    server, endpoint = pod["containers"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == gpus
    names = [entry["name"] for container in (server, endpoint) for entry in container["env"]]
    assert warnings_of_unknown(names) == []
    values = {entry["name"]: entry.get("value") for entry in server["env"]}
    drain_s, exit_s = int(values["KIMI_DRAIN_TIMEOUT_S"]), int(values["KIMI_EXIT_TIMEOUT_S"])
    pre_stop_s = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pre_stop_s + drain_s + exit_s + 5
    assert server["startupProbe"]["failureThreshold"] * server["startupProbe"]["periodSeconds"] >= 3600


def test_it_lints():
    report = helm.lint(str(CHART), {"models": {"claim": "weights"}})
    assert [message for message in report["messages"] if message["severity"] not in ("INFO", "info", 1)] == []


def test_without_weights_it_says_what_is_missing():
    with pytest.raises(Exception, match=r"models\.claim"):
        render({})
