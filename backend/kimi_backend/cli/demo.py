"""`kimi demo`: one prompt with speculation and without, shown, then measured in turns; ends with a line of JSON."""

import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kimi_backend.cli.comparison import Comparison, Verdict, compare, spread
from kimi_backend.cli.drafted_text import DraftedText
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import KimiError
from kimi_backend.serving.responses import speculation_json
from kimi_backend.spec_decode.policy import policy_shares
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta

PROMPT = "def test_add():\n    assert add(1, 2) == 3\n"
"""Chosen because what kimi-nano makes of it reads like code; demo/README.md has prompts that nobody chose."""
DEMO_MODEL_LEN = 1024
SEED = 1
MEASURE_S = 45.0
"""Measuring goes on so long where the verdict does not stand after the first pairs."""

_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One completion."""

    text: str
    tokens_per_second: float
    speculation: dict[str, Any] | None
    num_draft_tokens_histogram: list[int]
    """Verifies by the draft tokens they carried."""


Show = DraftedText | None
"""Gets the text as it comes; None where nobody watches."""
Generate = Callable[[str, int, int, float, Show], DemoRun]
"""generate(prompt, max_tokens, num_speculative_tokens, temperature, show)."""


def find_checkpoint(folder: Path) -> tuple[Path, bool]:
    """The trained checkpoint that ships with the project, or a random one made in `folder`; and which it is."""
    import kimi_backend

    trained = Path(kimi_backend.__file__).parents[2] / "demo" / "kimi-nano"
    if (trained / "config.json").exists():
        return trained, False
    from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset, default_num_layers
    from kimi_backend.cli.make_checkpoint import make_checkpoint
    from kimi_backend.config.quantization_config import QuantizationMethod

    random = folder / "checkpoint"
    make_checkpoint(
        random,
        preset=Preset.TINY,
        num_layers=default_num_layers(Preset.TINY),
        quantization=QuantizationMethod.INT4,
        draft=DraftKind.MLA,
        architecture=Architecture.KIMI_K25,
    )
    return random, True


@contextmanager
def through_server(settings: ServingSettings) -> Iterator[Generate]:
    """Start the real Triton Server, talk to it through the client, stop it."""
    from kimi_backend.hosting.settings_to_server import make_server
    from kimi_client import KimiClient, RequestFields

    with tempfile.TemporaryDirectory(prefix="kimi_demo_") as folder:
        server = make_server(settings, log_file=Path(folder) / "server.log")
        server.start()
        try:
            with _console.status("starting Triton Server ..."):
                server.wait_until_ready()
            client = KimiClient(f"localhost:{server.ports.grpc}")

            def generate(prompt: str, max_tokens: int, k: int, temperature: float, show: Show) -> DemoRun:
                fields: RequestFields = {"text_input": prompt, "max_tokens": max_tokens, "temperature": temperature}
                fields |= {"num_speculative_tokens": k, "seed": SEED, "return_token_origins": show is not None}
                with client.stream(**fields) as stream:
                    for chunk in stream:
                        if show:
                            show.show(chunk)
                    done = stream.result()
                speed = done.num_output_tokens / done.statistics["total_time_s"]
                return DemoRun(done.text, speed, done.speculation, done.statistics["num_draft_tokens_histogram"])

            yield generate
        finally:
            with _console.status("stopping Triton Server ..."):
                server.stop()


@contextmanager
def in_process(settings: ServingSettings) -> Iterator[Generate]:
    """The same engine and models in this process, for machines that the server wheel does not support."""
    from kimi_backend.cli.local_engine import local_engine
    from kimi_backend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(settings.tokenizer or settings.checkpoint)
    numbers = itertools.count()
    with local_engine(settings, tokenizer) as engine:

        def generate(prompt: str, max_tokens: int, k: int, temperature: float, show: Show) -> DemoRun:
            request = GenerateRequest(
                request_id=f"demo-{next(numbers)}",
                prompt_token_ids=tuple(tokenizer.encode(prompt)),
                sampling=SamplingParams(max_tokens=max_tokens, seed=SEED, temperature=temperature),
                num_speculative_tokens=k,
                return_token_origins=show is not None,
            )
            deltas, done = list[TokenDelta](), threading.Event()

            def sink(delta: TokenDelta) -> None:
                deltas.append(delta)
                if show:
                    show.show(delta)
                if delta.finish_reason is not None:
                    done.set()

            engine.submit(request, sink)
            done.wait()
            stats = deltas[-1].stats
            if stats is None or deltas[-1].error is not None:
                raise KimiError(deltas[-1].error or "the engine gave no statistics")
            speed = stats.num_output_tokens / stats.total_time_s
            histogram = list(stats.num_draft_tokens_histogram)
            return DemoRun("".join(d.text for d in deltas), speed, speculation_json(stats.speculation), histogram)

        yield generate


def run_demo(
    *,
    prompt: str,
    max_tokens: int,
    num_speculative_tokens: int,
    temperature: float,
    is_in_process: bool,
    proposer: str = Proposer.EAGLE3.value,
) -> int:
    """Show both completions, then measure them in turns. Returns the exit code: 0 when all texts are equal."""
    with tempfile.TemporaryDirectory(prefix="kimi_demo_") as folder:
        checkpoint, is_random = find_checkpoint(Path(folder))
        if is_random:
            _console.print("[yellow]No trained checkpoint here: this one is random, so the text is noise and the")
            _console.print("[yellow]draft is rarely right. What it shows is that speculation changes no token.")
        settings = ServingSettings(
            checkpoint=str(checkpoint),
            draft=str(checkpoint / "draft"),
            max_model_len=DEMO_MODEL_LEN,
            num_speculative_tokens=num_speculative_tokens,
            proposer=proposer,
            speculation_policy="fixed",  # to show what drafting does, also where it does not pay
        )
        drafted = {"speculative": num_speculative_tokens, "plain": 0}
        runs: dict[str, list[DemoRun]] = {name: [] for name in drafted}
        with (in_process if is_in_process else through_server)(settings) as generate:
            with _console.status("warming up ..."):
                for k in drafted.values():
                    generate(prompt, max_tokens, k, temperature, None)
            for name, k in drafted.items():
                _console.rule(f"{name}, k = {k}, temperature {temperature:g}")
                _write(prompt)
                shown = DraftedText()
                runs[name].append(generate(prompt, max_tokens, k, temperature, shown))
                _write("\n")
                guessed = "; [green]green[/]: guessed by the draft" if k else ""
                if k and settings.chosen_proposer.uses_lookup:
                    guessed += ", [cyan]cyan[/]: stood in the text before"
                _console.print(f"[dim]{shown.summary()}[/]{guessed}")

            def measure(name: str) -> float:
                runs[name].append(generate(prompt, max_tokens, drafted[name], temperature, None))
                return runs[name][-1].tokens_per_second

            _console.rule("both again, in turns")
            with _console.status("measuring ...") as status:
                comparison = compare(
                    measure,
                    limit_s=MEASURE_S,
                    on_pair=lambda c: status.update(f"measuring: {c.speedup.median:.2f} x after {len(c.plain)} pairs"),
                )
    return _report(runs["speculative"][0], comparison, len({run.text for each in runs.values() for run in each}) == 1)


def _report(speculative: DemoRun, comparison: Comparison, is_equal: bool) -> int:
    acceptance = speculative.speculation or {}
    per_position = acceptance.get("acceptance_per_position", [])
    table = Table(title=f"texts are {'equal' if is_equal else 'DIFFERENT'}")
    for column in ("", "speculative", "plain"):
        table.add_column(column, justify="right")
    speeds = (spread(comparison.speculative), spread(comparison.plain))
    table.add_row("tokens/s, median", *(f"{speed.median:.1f}" for speed in speeds))
    table.add_row("interval", *(f"{speed.low:.1f} to {speed.high:.1f}" for speed in speeds))
    table.add_row("acceptance length", f"{acceptance.get('mean_acceptance_length') or 1:.2f}", "1.00")
    for position, rate in enumerate(per_position, 1):
        table.add_row(f"accepted at position {position}", "-" if rate is None else f"{rate:.0%}", "")
    shares = policy_shares(speculative.num_draft_tokens_histogram)
    table.add_row("verifies with k = 0, 1, …", shares, "100%")
    _console.print(table)
    _console.print(comparison.sentence())
    if comparison.verdict is Verdict.SLOWER:
        _console.print("A server that chooses k by itself (setting speculation_policy) leaves the draft alone then.")
    summary = {
        "texts_equal": is_equal,
        "acceptance_length": acceptance.get("mean_acceptance_length"),
        "acceptance_per_position": per_position,
        "num_draft_tokens_histogram": speculative.num_draft_tokens_histogram,
        **comparison.as_json(),
    }
    _write(json.dumps(summary) + "\n")
    return 0 if is_equal else 1


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
