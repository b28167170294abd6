"""Does the adaptive choice of k ever lose? kimi-nano through the real Triton Server, on a CPU.

    python benchmarks/speculation_policy.py [--temperatures 0 1] [--streams 1 4 8] [--repeats 5] [--json OUT]

Three servers run side by side: one without a draft, one that drafts as many tokens as each request asks for, and one
that chooses (`speculation_policy = adaptive`). For each temperature and number of streams the cases take turns in short
slices, so that whatever else the machine does falls on all alike, and medians are compared. The adaptive server is
not told of a change: it meets each new load as it comes, and its first slice, which pays for learning, is shown apart.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field

from kimi_backend.config.settings import ServingSettings
from kimi_client.load import LoadResult, run_load
from serving_suite.policy_rows import MOST_DRAFT_TOKENS, measure, table, verdict
from serving_suite.side_by_side import ServedCase, add_common_options, provenance, servers_side_by_side


@dataclass(slots=True)
class Case(ServedCase):
    """One way of serving, and how many tokens it drafted."""

    verifies: list[int] = field(default_factory=lambda: [0] * (MOST_DRAFT_TOKENS + 1))
    """Counts by number of draft tokens."""

    def run(self, temperature: float, streams: int, num_requests: int, max_tokens: int) -> None:
        """One slice."""
        requests = [self.request(i, temperature, max_tokens) for i in range(num_requests)]
        result: LoadResult = asyncio.run(run_load(f"localhost:{self.server.ports.grpc}", requests, streams))
        if result.errors:
            raise SystemExit(f"{self.name}: {result.errors[0]}")
        self.rates.append(result.output_tokens_per_second)
        self.texts = sorted(request.completion.text for request in result.requests)
        for request in result.requests:
            for k, count in enumerate(request.completion.statistics["num_draft_tokens_histogram"]):
                self.verifies[k] += count


def server_settings(args: argparse.Namespace) -> dict[str, ServingSettings]:
    """The servers: without a draft, fixed, adaptive."""
    return {
        name: ServingSettings(
            checkpoint=str(args.checkpoint),
            draft=draft,
            device="cpu",
            max_model_len=1024,
            max_num_seqs=32,
            speculation_policy="adaptive" if name == "adaptive" else "fixed",
        )
        for name, draft in (("plain", ""), ("fixed", str(args.draft)), ("adaptive", str(args.draft)))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    args = parser.parse_args()
    runs = []
    with servers_side_by_side(server_settings(args)) as servers:
        for temperature in args.temperatures:
            for streams in args.streams:
                cases = [
                    Case("no draft", servers["plain"], 0),
                    *(Case(f"k = {k}", servers["fixed"], k) for k in args.k),
                    Case("adaptive", servers["adaptive"], MOST_DRAFT_TOKENS),
                ]
                runs.append(measure(cases, temperature, streams, args))
                print(json.dumps(runs[-1]), file=sys.stderr)
    print(table(runs) + "\n\n" + verdict(runs))
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
