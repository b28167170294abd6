"""`kimi demo`: one prompt with speculation and without, side by side, ending with one line of JSON."""

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

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import KimiError
from kimi_backend.serving.responses import speculation_json
from kimi_backend.spec_decode.policy import policy_shares
from kimi_backend.types.request import GenerateRequest, SamplingParams, TokenDelta

PROMPT = "def fibonacci(n):\n    "
DEMO_MODEL_LEN = 1024
SEED = 1

_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One completion."""

    text: str
    tokens_per_second: float
    speculation: dict[str, Any] | None
    num_draft_tokens_histogram: list[int]
    """Verifies by the draft tokens they carried."""


Generate = Callable[[str, int, int, float], DemoRun]
"""generate(prompt, max_tokens, num_speculative_tokens, temperature), writing the text to stdout as it comes."""


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
    from kimi_backend.cli.serve import make_server
    from kimi_client import KimiClient

    with tempfile.TemporaryDirectory(prefix="kimi_demo_") as folder:
        server = make_server(settings, log_file=Path(folder) / "server.log")
        server.start()
        try:
            with _console.status("starting Triton Server ..."):
                server.wait_until_ready()
            client = KimiClient(f"localhost:{server.ports.grpc}")

            def generate(prompt: str, max_tokens: int, k: int, temperature: float) -> DemoRun:
                fields = {"max_tokens": max_tokens, "num_speculative_tokens": k, "seed": SEED}
                with client.stream(text_input=prompt, temperature=temperature, **fields) as stream:
                    for chunk in stream:
                        _write(chunk.text)
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
    with local_engine(settings, tokenizer) as engine:

        def generate(prompt: str, max_tokens: int, k: int, temperature: float) -> DemoRun:
            request = GenerateRequest(
                request_id=f"demo-{k}",
                prompt_token_ids=tuple(tokenizer.encode(prompt)),
                sampling=SamplingParams(max_tokens=max_tokens, seed=SEED, temperature=temperature),
                num_speculative_tokens=k,
            )
            deltas, done = list[TokenDelta](), threading.Event()

            def sink(delta: TokenDelta) -> None:
                deltas.append(delta)
                _write(delta.text)
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
    *, prompt: str, max_tokens: int, num_speculative_tokens: int, temperature: float, is_in_process: bool
) -> int:
    """Show both completions and how they compare. Returns the exit code: 0 when the texts are equal."""
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
            speculation_policy="fixed",  # to show what drafting does, also where it does not pay
        )
        runs = {}
        with (in_process if is_in_process else through_server)(settings) as generate:
            _console.rule("warming up")
            generate(prompt, 8, num_speculative_tokens, temperature)
            _write("\n")
            for name, k in (("speculative", num_speculative_tokens), ("plain", 0)):
                _console.rule(f"{name}, k = {k}, temperature {temperature:g}")
                _write(prompt)
                runs[name] = generate(prompt, max_tokens, k, temperature)
                _write("\n")
    return _report(runs)


def _report(runs: dict[str, DemoRun]) -> int:
    speculative, plain = runs["speculative"], runs["plain"]
    is_equal = speculative.text == plain.text
    acceptance = speculative.speculation or {}
    per_position = acceptance.get("acceptance_per_position", [])
    table = Table(title=f"texts are {'equal' if is_equal else 'DIFFERENT'}")
    for column in ("", "speculative", "plain"):
        table.add_column(column, justify="right")
    table.add_row("tokens/s", f"{speculative.tokens_per_second:.1f}", f"{plain.tokens_per_second:.1f}")
    table.add_row("acceptance length", f"{acceptance.get('mean_acceptance_length') or 1:.2f}", "1.00")
    for position, rate in enumerate(per_position, 1):
        table.add_row(f"accepted at position {position}", "-" if rate is None else f"{rate:.0%}", "")
    shares = policy_shares(speculative.num_draft_tokens_histogram)
    table.add_row("verifies with k = 0, 1, …", shares, "100%")
    _console.print(table)
    if speculative.tokens_per_second < plain.tokens_per_second:
        _console.print(
            "Speculation was slower here: a step of so small a target takes little more than the draft and the calls"
            " between the processes (demo/README.md, Speed on a CPU). A server on a CPU finds that out and leaves the"
            " draft alone then (setting speculation_policy); this demo always drafts."
        )
    summary = {
        "texts_equal": is_equal,
        "acceptance_length": acceptance.get("mean_acceptance_length"),
        "acceptance_per_position": per_position,
        "num_draft_tokens_histogram": speculative.num_draft_tokens_histogram,
        "tokens_per_second": {name: round(run.tokens_per_second, 2) for name, run in runs.items()},
    }
    _write(json.dumps(summary) + "\n")
    return 0 if is_equal else 1


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
