"""Attacks a server of its own as a stranger on the network would, and prints a table of what held.

    python scripts/attack.py [--checkpoint demo/kimi-nano] [--plans 2000] [--seed 0]

It serves a checkpoint with its draft on 127.0.0.1 as `kimi serve` does, tries what is in `attack_suite`, then sends
each runner as many fuzzed plans. The exit code is 1 if anything got through or the server has died.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attack_suite.access_attacks import ACCESS_ATTACKS
from attack_suite.request_attacks import REQUEST_ATTACKS, trace_of_tensors
from attack_suite.runner_attacks import RUNNER_ATTACKS, fuzz
from attack_suite.victim import Broken, Victim
from kimi_backend.config.settings import ServingSettings
from kimi_backend.hosting.settings_to_server import make_server

ROOT = Path(__file__).resolve().parents[1]
PLANS_AT_ONCE = 250
"""Plans after which the server must still say what it said before."""


def fuzz_in_parts(victim: Victim, count: int, seed: int) -> str:
    """Fuzz both runners, and look in between whether the server's text is still the same."""
    expected = victim.generate(text_input="the same", max_tokens=12, seed=3)[1]["text_output"]
    told = ""
    for part, start in enumerate(range(0, count, PLANS_AT_ONCE)):
        told = fuzz(victim, min(PLANS_AT_ONCE, count - start), 1000 * seed + part)
        if victim.generate(text_input="the same", max_tokens=12, seed=3)[1]["text_output"] != expected:
            raise Broken(f"part {part} of seed {seed}: another text than before")
    return f"{count} plans each, none INTERNAL; of the last part {told}"


def attack(victim: Victim, count: int, seed: int, console: Console) -> bool:
    """Run everything; returns whether all of it held."""
    table = Table("attack", "held", "seconds", "what was seen")
    attacks: list[tuple[str, Callable[[Victim], str]]] = [
        (a.__name__, a) for a in (*ACCESS_ATTACKS, *RUNNER_ATTACKS, *REQUEST_ATTACKS, trace_of_tensors)
    ]
    attacks.append(("fuzzed_plans", partial(fuzz_in_parts, count=count, seed=seed)))
    has_held = True
    for name, run in attacks:
        start = time.monotonic()
        try:
            seen, is_held = run(victim), True
        except (Broken, OSError, ValueError) as problem:
            seen, is_held = f"{type(problem).__name__}: {problem}", False
        has_held &= is_held
        table.add_row(name, "yes" if is_held else "NO", f"{time.monotonic() - start:.1f}", seen)
    console.print(table)
    return has_held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo/kimi-nano", help="its draft is in draft/")
    parser.add_argument("--plans", type=int, default=2000, help="fuzzed plans for each runner")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint.resolve()
    settings = ServingSettings(checkpoint=str(checkpoint), draft=str(checkpoint / "draft"), device="cpu", unary="true")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="kimi_attack_") as folder:
        log = Path(folder, "server.log")
        traces = Path(folder, "trace.json")
        server = make_server(
            settings,
            log_file=log,
            ends_with_parent=True,
            options=("--trace-config=mode=triton", f"--trace-config=triton,file={traces}"),
        )
        server.start()
        try:
            with console.status("loading the models ..."):
                server.wait_until_ready()
            victim = Victim.of(server, checkpoint, traces)
            with console.status("attacking ..."):
                has_held = attack(victim, arguments.plans, arguments.seed, console)
            secret = victim.runner_secret
            command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
            for where, text in (("log", log.read_bytes()), ("arguments", command)):
                if secret in text or secret.hex().encode() in text:
                    console.print(f"the runners' secret stands in the server's {where}")
                    has_held = False
        finally:
            server.stop()
    return 0 if has_held else 1


if __name__ == "__main__":
    sys.exit(main())
