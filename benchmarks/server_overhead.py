"""Steps a second through Triton Server against a bare loop of the same two BLS calls, in one run.

    python benchmarks/server_overhead.py --checkpoint PATH [--json OUT]

The bare loop is a Python-backend model (benchmarks/models/bare_loop) that sends both runners a plan of the same
shape as a steady step: B sequences, k + 1 rows each. What the served rate lacks against it is scheduling, packing,
detokenising and sending B responses to B readers.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

from kimi_backend.cli.serve import find_model_repository, make_server
from kimi_backend.config.settings import ServingSettings
from kimi_backend.serving.embedded_server import MODELS, EmbeddedServer
from kimi_backend.types import codec
from kimi_backend.types.plan import AuxHandle, DraftPlan, RowPlan, SamplingPlan, TargetPlan
from kimi_client.load import run_load

BLOCK_SIZE = 64
CONTEXT = 128
OUTPUT_TOKENS = 96


def plain_sampling(count: int) -> SamplingPlan:
    """Temperature 1 and nothing else, as the served requests ask for."""
    empty, offsets = np.empty(0, np.int32), np.zeros(count + 1, np.int32)
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    return SamplingPlan(
        temperature=ones,
        top_k=np.zeros(count, np.int32),
        top_p=ones,
        min_p=zeros,
        seed=np.arange(count, dtype=np.int64),
        repetition_penalty=ones,
        frequency_penalty=zeros,
        presence_penalty=zeros,
        penalty_offsets=offsets,
        penalty_ids=empty,
        penalty_counts=empty,
        penalty_in_prompt=np.empty(0, np.bool_),
        bias_offsets=offsets,
        bias_ids=empty,
        bias_values=np.empty(0, np.float32),
        ban_offsets=offsets,
        ban_ids=empty,
        ban_until=np.empty(0, np.int64),
        bad_word_offsets=offsets,
        bad_word_token_offsets=np.zeros(1, np.int32),
        bad_word_tokens=empty,
        history_tail=np.full((count, 1), -1, np.int32),
    )


def steady_plans(count: int, k: int) -> tuple[TargetPlan, DraftPlan]:
    """A verify of `count` sequences of CONTEXT tokens and the draft step after it, with half of the drafts accepted."""
    blocks = -(-(CONTEXT + 2 * k + 2) // BLOCK_SIZE)
    table = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    accepted = k // 2
    target = TargetPlan(
        step_id=0,
        rows=RowPlan(
            token_ids=np.ones(count * (k + 1), np.int32),
            query_lens=np.full(count, k + 1, np.int32),
            seq_lens=np.full(count, CONTEXT + k + 1, np.int32),
            block_table=table,
        ),
        num_sampled_rows=np.full(count, k + 1, np.int32),
        sampling=plain_sampling(count),
        num_logprobs=None,
        wants_aux=np.ones(count, np.bool_),
    )
    rows = accepted + 1
    first = np.arange(count)[:, None] * (k + 1)
    draft = DraftPlan(
        step_id=0,
        rows=RowPlan(
            token_ids=np.ones(count * rows, np.int32),
            query_lens=np.full(count, rows, np.int32),
            seq_lens=np.full(count, CONTEXT + rows, np.int32),
            block_table=table,
        ),
        aux=AuxHandle(),
        aux_rows=(first + np.arange(rows)).reshape(-1).astype(np.int64),
        num_proposals=np.full(count, k, np.int32),
        greedy=np.zeros(count, np.bool_),
        sampling=plain_sampling(count),
        output_index=np.full(count, CONTEXT + rows + 1, np.int64),
    )
    return target, draft


def bare_round_ms(client: grpcclient.InferenceServerClient, count: int, k: int, rounds: int) -> float:
    """Median of the bare loop's rounds."""
    target, draft = steady_plans(count, k)
    arrays = {
        "TARGET_PLAN": (codec.encode(target), "UINT8"),
        "DRAFT_PLAN": (codec.encode(draft), "UINT8"),
        "ROUNDS": (np.array([rounds], np.int32), "INT32"),
    }
    inputs = []
    for name, (array, datatype) in arrays.items():
        tensor = grpcclient.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return float(np.median(client.infer("bare_loop", inputs).as_numpy("SECONDS"))) * 1e3


def served_round_ms(server: EmbeddedServer, count: int, k: int) -> tuple[float, float]:
    """Mean time of a step while `count` streams run, each with its reader; and responses a step and stream."""
    fields = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "num_speculative_tokens": k}
    requests = [{"text_input": "x" * 64, "seed": i, **fields} for i in range(count)]
    result = asyncio.run(run_load(f"localhost:{server.ports.grpc}", requests, count))
    if result.errors:
        raise RuntimeError(result.errors[0])
    # The request with the most rounds ran from the first step to the last.
    longest = max(result.requests, key=lambda r: r.completion.speculation["num_spec_steps"])
    steps = longest.completion.speculation["num_spec_steps"]
    return (longest.total_s - longest.first_token_s) / steps * 1e3, len(longest.chunk_times_s) / (steps + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        repository.mkdir()
        for model in [find_model_repository() / name for name in MODELS] + [Path(__file__).parent / "models/bare_loop"]:
            (repository / model.name).symlink_to(model.resolve())
        settings = ServingSettings(
            checkpoint=str(args.checkpoint.resolve()),
            draft=str(args.checkpoint.resolve() / "draft"),
            max_model_len=512,
            kv_tokens=512 * max(args.streams),
        )
        server = make_server(settings, model_repository=repository, log_file=Path(folder) / "log")
        server.load_too("bare_loop")
        server.start()
        try:
            server.wait_until_ready()
            client = grpcclient.InferenceServerClient(f"localhost:{server.ports.grpc}")
            for count in args.streams:
                bare = bare_round_ms(client, count, args.k, args.rounds)
                served, responses = served_round_ms(server, count, args.k)
                rows.append({"streams": count, "bare_ms": bare, "served_ms": served, "responses_per_step": responses})
        finally:
            server.stop()
    print(f"{'streams':>8} {'bare ms':>9} {'served ms':>10} {'steps/s':>9} {'of bare':>8} {'responses a step':>17}")
    for row in rows:
        share = row["bare_ms"] / row["served_ms"]
        print(
            f"{row['streams']:>8} {row['bare_ms']:>9.2f} {row['served_ms']:>10.2f} {1e3 / row['served_ms']:>9.1f}"
            f" {share:>8.0%} {row['responses_per_step']:>17.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "k": args.k, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
