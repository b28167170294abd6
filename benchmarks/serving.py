"""Loads a server with Triton's perf_analyzer and draws what it measured. One command a suite:

    python benchmarks/serving.py concurrency     --checkpoint PATH --draft PATH   with and without speculation
    python benchmarks/serving.py rate            --checkpoint PATH --draft PATH   Poisson arrivals
    python benchmarks/serving.py long-prompt     --checkpoint PATH --draft PATH
    python benchmarks/serving.py shared-prefix   --checkpoint PATH --draft PATH
    python benchmarks/serving.py plot FILE.json                                   draw a kept report again

It starts the embedded server; `--url host:port` takes one that runs (its gRPC port) instead. The report goes to --out
(default benchmarks/results/serving_SUITE.json), the picture beside it. scripts/get_perf_analyzer.sh installs the tool,
`pip install -e .[plots]` matplotlib. Settings of the server come from KIMI_* variables (docs/settings.md).
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kimi_backend.cli.perf_analyzer import find_perf_analyzer
from kimi_backend.cli.setting_options import read_settings
from kimi_backend.config.settings import ENVIRONMENT_PREFIX, ServingSettings
from kimi_backend.errors import KimiError
from kimi_backend.hosting.settings_to_server import make_server
from kimi_client import KimiClient
from serving_suite.loads import SUITES, LoadSettings
from serving_suite.measure import run_case
from serving_suite.plots import draw

RESULTS = Path(__file__).parent / "results"


def numbers(text: str) -> tuple[float, ...]:
    """Comma-separated numbers of the command line."""
    return tuple(float(part) if "." in part else int(part) for part in text.split(","))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="suite", required=True)
    defaults = LoadSettings()
    for suite in SUITES:
        command = commands.add_parser(suite)
        command.add_argument("--checkpoint")
        command.add_argument("--draft")
        command.add_argument("--url", help="gRPC host:port of a running server")
        command.add_argument("--out", type=Path, default=RESULTS / f"serving_{suite.replace('-', '_')}.json")
        command.add_argument("--note", default="", help="kept in the report: hardware, anything worth knowing")
        command.add_argument("-k", type=int, default=defaults.num_speculative_tokens)
        command.add_argument("--max-tokens", type=int, default=defaults.max_tokens)
        command.add_argument("--requests", type=int, default=defaults.num_requests)
        command.add_argument("--temperature", type=float, default=defaults.temperature)
        command.add_argument("--concurrencies", type=numbers, default=defaults.concurrencies)
        command.add_argument("--rates", type=numbers, default=defaults.rates)
        command.add_argument("--prompt-characters", type=numbers, default=defaults.prompt_characters)
        command.add_argument("--prefix-characters", type=int, default=defaults.prefix_characters)
    commands.add_parser("plot").add_argument("report", type=Path)
    return parser.parse_args(arguments)


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """The gRPC address of the server to load."""
    if options.url is not None:
        yield options.url
        return
    settings = read_settings({"checkpoint": str(options.checkpoint), "draft": str(options.draft or "")}, os.environ)
    with tempfile.TemporaryDirectory(prefix="kimi_serving_") as folder:
        server = make_server(settings, log_file=Path(folder, "server.log"))
        server.start()
        try:
            server.wait_until_ready()
            yield f"localhost:{server.ports.grpc}"
        finally:
            server.stop()


def load_settings(options: argparse.Namespace) -> LoadSettings:
    return LoadSettings(
        num_speculative_tokens=options.k,
        max_tokens=options.max_tokens,
        num_requests=options.requests,
        temperature=options.temperature,
        concurrencies=options.concurrencies,
        rates=options.rates,
        prompt_characters=options.prompt_characters,
        prefix_characters=options.prefix_characters,
    )


def machine() -> str:
    """Name the machine on which it ran."""
    import torch  # drawing a kept report does without it

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before, {platform.machine()}"


def command_line(options: argparse.Namespace) -> str:
    """Return the command as it was typed, without this machine's paths."""
    parts = [f"python benchmarks/serving.py {options.suite}"]
    for name, value in vars(options).items():
        if name in ("suite", "note", "out") or value is None:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        parts.append(f"{'-k' if name == 'k' else '--' + name.replace('_', '-')} {'PATH' if '/' in text else text}")
    return " ".join(parts)


def settings_given() -> dict[str, str]:
    """The server's settings that the environment gives; no paths, and nothing that is not a setting."""
    variables = {f.name: ENVIRONMENT_PREFIX + f.name.upper() for f in dataclasses.fields(ServingSettings)}
    given = {name: os.environ.get(variable, "") for name, variable in variables.items()}
    return {name: value for name, value in given.items() if value and "/" not in value}


def run_suite(options: argparse.Namespace) -> None:
    program = find_perf_analyzer()
    if program is None:
        raise KimiError("perf_analyzer is not installed: run scripts/get_perf_analyzer.sh")
    settings = load_settings(options)
    report = {
        "suite": options.suite,
        "what": options.note or machine(),
        "machine": machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command_line(options),
        "settings": settings_given(),
        "cases": [],
    }
    with served(options) as url:
        # The first requests compile kernels and grow regions.
        KimiClient(url).generate(text_input="def warm_up():", max_tokens=16, ignore_eos=True)
        for case in SUITES[options.suite](settings):
            measured = run_case(program, url, case)
            report["cases"].append(measured)
            print(
                f"{case.label:>22} {case.x:>8g}: {measured['output_tokens_per_second']:>8.1f} tokens/s, first token "
                f"{measured['first_token_ms']['p50']:.0f} ms, a token {measured['inter_token_ms']['p50']:.1f} ms",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.out.with_suffix(".png"))
    print(f"{options.out}, {options.out.with_suffix('.png')}")


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    try:
        if options.suite == "plot":
            draw(json.loads(options.report.read_text()), options.report.with_suffix(".png"))
        else:
            run_suite(options)
    except KimiError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
