"""Draws the Grafana dashboard's own queries with data of a real server under a small load.

    python benchmarks/dashboard_picture.py --checkpoint PATH --draft PATH [--minutes 5] [--out FILE.png]

Starts the embedded server, an OpenAI-compatible endpoint beside it and a Prometheus (from the PATH; Debian's package
`prometheus`) that scrapes both and evaluates docker/alerts.yml, sends a load that changes to both, asks Prometheus what
each panel would ask, and draws the answers with matplotlib. Grafana's own rendering needs Grafana; the queries, titles
and units are read from docker/grafana/dashboards/kimi.json.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kimi_backend.cli.setting_options import read_settings
from kimi_backend.errors import KimiError
from kimi_backend.hosting.embedded_server import ServerPorts, free_port
from kimi_backend.hosting.settings_to_server import make_server
from kimi_client import KimiClientError
from kimi_client.aio import AsyncKimiClient
from serving_suite.loads import code_prompts, source_text

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "docker/grafana/dashboards/kimi.json"
ALERTS = ROOT / "docker/alerts.yml"
KEYS = {"team-a": {"key": "sk-a", "rate": "120/minute"}, "team-b": {"key": "sk-b", "concurrency": 1}}
"""Two callers of the endpoint; the second one's limit refuses some of its requests."""
STEP_S = 2
PHASES = ((1, 0.2), (4, 0.4), (8, 0.25), (2, 0.15))
"""(streams, share of the time): a load that grows and falls."""


@contextmanager
def endpoint(grpc_port: int, folder: Path) -> Iterator[tuple[int, int]]:
    """An OpenAI-compatible endpoint of two keys; yields its port and that of its metrics."""
    (folder / "keys.json").write_text(json.dumps(KEYS))
    port, metrics_port = free_port(), free_port()
    ports = (f"--url=localhost:{grpc_port}", f"--port={port}", f"--metrics-port={metrics_port}")
    command = [sys.executable, "-m", "kimi_backend.cli.main", "openai", *ports]
    with (folder / "endpoint.log").open("wb") as log:
        environment = {**os.environ, "KIMI_API_KEYS_FILE": str(folder / "keys.json")}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield port, metrics_port
    finally:
        process.terminate()
        process.wait()


@contextmanager
def prometheus(jobs: dict[str, int], folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes the jobs' ports every second; yields its address."""
    program = shutil.which("prometheus")
    if program is None:
        raise KimiError("prometheus is not on the PATH (Debian: apt-get install prometheus)")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [f"localhost:{port}"]}]} for name, port in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    options = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
    with (folder / "prometheus.log").open("wb") as log:
        command = [program, *options, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def send_wrong(http_port: int) -> None:
    """A request that is refused."""
    body = json.dumps({"text_input": "x", "temperature": -1.0}).encode()
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://localhost:{http_port}/v2/models/spec_ensemble/generate", data=body).close()


def send_chat(port: int, number: int) -> None:
    """A completion through the endpoint, of either key, now and then one that is wrong."""
    key = list(KEYS.values())[number % 2]["key"]
    body = {"prompt": f"def f{number}(", "max_tokens": 0.5 if number % 9 == 8 else 24, "seed": number}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with contextlib.suppress(urllib.error.URLError):
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()


async def send_load(ports: ServerPorts, openai_port: int, seconds: float) -> int:
    """Streams of code prompts, now and then one that is cancelled, wrong, or shares a long beginning."""
    prompts, prefix, num_sent = code_prompts(), source_text()[:1500], 0
    async with AsyncKimiClient(f"localhost:{ports.grpc}") as client:

        async def one(index: int) -> None:
            fields: dict[str, Any] = {"text_input": next(prompts), "max_tokens": 48, "seed": index}
            if index % 3 == 0:
                fields["text_input"] = f"{prefix}\n\n{fields['text_input']}"
            if index % 2:
                await asyncio.to_thread(send_chat, openai_port, index // 2)
            if index % 11 == 10:
                await asyncio.to_thread(send_wrong, ports.http)
            if index % 7 == 6:
                fields |= {"timeout_s": 0.4, "ignore_eos": True}
            with contextlib.suppress(KimiClientError):
                async for _ in client.stream(**fields):
                    pass

        async def worker(end_s: float) -> None:
            nonlocal num_sent
            while time.monotonic() < end_s:
                num_sent += 1
                await one(num_sent)

        for streams, share in PHASES:
            end_s = time.monotonic() + share * seconds
            await asyncio.gather(*(worker(end_s) for _ in range(streams)))
    return num_sent


def query_range(address: str, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Return what Prometheus answers to a panel's query.

    Raises:
        KimiError: it refuses the query.
    """
    values = {"query": expression, "start": start_s, "end": end_s, "step": STEP_S}
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{urllib.parse.urlencode(values)}") as reply:
        answer = json.load(reply)
    if answer["status"] != "success":
        raise KimiError(f"{expression}: {answer}")
    return list(answer["data"]["result"])


def alert_states(address: str) -> dict[str, str]:
    """Each alert rule's state, such as inactive, and how Prometheus fared with it."""
    with urllib.request.urlopen(f"{address}/api/v1/rules?type=alert") as reply:
        rules = [rule for group in json.load(reply)["data"]["groups"] for rule in group["rules"]]
    return {rule["name"]: f"{rule['state']}, {rule['health']}" for rule in rules}


def legend_of(template: str, labels: dict[str, str]) -> str:
    """Grafana's `{{label}}` filled in."""
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def draw_panel(axes: Axes, panel: dict[str, Any], address: str, start_s: float, end_s: float) -> int:
    """Draw a panel; returns how many series had data."""
    scale = {"percentunit": 100.0}.get(panel["fieldConfig"]["defaults"]["unit"], 1.0)
    lines = []
    for target in panel["targets"]:
        for series in query_range(address, target["expr"], start_s, end_s):
            points = [(float(t) - start_s, scale * float(v)) for t, v in series["values"] if v != "NaN"]
            if points:
                lines.append((legend_of(target["legendFormat"], series["metric"]), points))
    is_all_zero = all(value == 0 for _, points in lines for _, value in points)
    for legend, points in lines:
        # Counters of causes that never came would hide the others behind their legend.
        has_value = is_all_zero or any(value for _, value in points)
        axes.plot(*zip(*points, strict=True), linewidth=1.2, label=legend if has_value else None)
    unit = {"percentunit": " (%)", "s": " (s)", "reqps": " (1/s)"}.get(panel["fieldConfig"]["defaults"]["unit"], "")
    axes.set_title(panel["title"] + unit, fontsize=9, loc="left")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, end_s - start_s)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if lines:
        axes.legend(fontsize=6, loc="best", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
    return len(lines)


def draw_dashboard(address: str, start_s: float, end_s: float, title: str, out: Path) -> None:
    """The whole dashboard, four panels a row as in Grafana."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = -(-len(panels) // 4)
    figure = Figure(figsize=(16, 2.6 * rows), layout="constrained")
    places = figure.subplots(rows, 4).flatten()
    for spare in places[len(panels) :]:
        spare.remove()
    for axes, panel in zip(places, panels, strict=False):
        count = draw_panel(axes, panel, address, start_s, end_s)
        print(f"{panel['title']}: {count} series")
    figure.suptitle(title, fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=90)


def run(options: argparse.Namespace) -> None:
    settings = read_settings({"checkpoint": str(options.checkpoint), "draft": str(options.draft or "")}, os.environ)
    with tempfile.TemporaryDirectory(prefix="kimi_dashboard_") as name:
        folder = Path(name)
        server = make_server(settings, log_file=folder / "server.log")
        server.start()
        try:
            server.wait_until_ready()
            with (
                endpoint(server.ports.grpc, folder) as (openai_port, openai_metrics),
                prometheus({"triton": server.ports.metrics, "openai": openai_metrics}, folder) as address,
            ):
                start_s = time.time()
                count = asyncio.run(send_load(server.ports, openai_port, 60 * options.minutes))
                if server.process.poll() is not None:
                    raise KimiError(f"the server ended with code {server.process.returncode} under the load")
                time.sleep(3)
                model = Path(settings.checkpoint).name
                title = (
                    f"Queries of the dashboard, {model}, {count} requests, x: seconds; drawn by matplotlib, not Grafana"
                )
                draw_dashboard(address, start_s, time.time(), title, options.out)
                for name, rule in alert_states(address).items():
                    print(f"alert {name}: {rule}")
        finally:
            server.stop()
    print(options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/dashboard.png")
    try:
        run(parser.parse_args())
    except KimiError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
