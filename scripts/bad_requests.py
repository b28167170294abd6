"""Measure what a bad request costs the others beside it, and whether memory goes back after many.

    python scripts/bad_requests.py [--checkpoint demo/kimi-nano] [--repeats 100] [--seconds 3] [--only NAME ...]

It starts `kimi serve` on free ports of 127.0.0.1. For each kind of bad request another process sends one after the
other, while new requests for one token are timed over HTTP and over gRPC, and the longest gap of running streams:
alone, beside it, and beside the same request with one more field of a wrong type, which Triton Server refuses itself,
before any code of this project. Then so many more are sent, twice: the memory of the server's processes and its
shared-memory regions after the second time are compared with those after the first.

Kinds whose name ends with "as large as may be" are within the limits of docs/protocol.md, and the checkpoint is served
with a context so long that their text is parsed, rendered and tokenised before they are refused.
"""

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from beside import MB, Question, ask_in_turns, json_post, regions_mb, resident_mb, seconds_of, sending
from kimi_client import KimiClient
from served_load import Served, serving

ROOT = Path(__file__).resolve().parent.parent
GENERATE = "/v2/models/spec_ensemble/generate"
NEW = {"text_input": "hi", "max_tokens": 1}
REFUSED_BY_TRITON = {"top_k": "a word"}
MAX_MODEL_LEN = 2**18
STREAM = {"text_input": "tell", "max_tokens": 40, "ignore_eos": True}


def _chat(*contents: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents]
    return {"messages": json.dumps(messages), **more}


def _tools(num_bytes: int) -> str:
    function = {"name": "f", "description": "word " * (num_bytes // 5), "parameters": {"type": "object"}}
    return json.dumps([{"type": "function", "function": function}])


def _bias(count: int) -> str:
    return json.dumps({str(number): 1.5 for number in range(count)})


def bad_requests() -> dict[str, dict[str, Any]]:
    """Fields of a request for `generate`, by kind."""
    return {
        "chat of 15 MB": _chat("word " * (3 * MB)),
        "500,000 bad words": {"text_input": "x", "bad_words": ["word"] * 500_000},
        "200,000 messages": _chat(*["word"] * 200_000),
        "messages of 2,000,000 lists": {"messages": f"[{','.join(['[]'] * (2 * MB))}]"},
        "tool description of 10 MB": _chat("x", tools=_tools(10 * MB)),
        "logit bias of 20 MB": {"text_input": "x", "logit_bias": _bias(1_500_000)},
        "text as large as may be": {"text_input": "word " * (8 * MB // 5)},
        "input ids as large as may be": {"input_ids": [1] * 2**21},
        "bad words as large as may be": {"text_input": "x", "bad_words": [f"{i} {'w' * 56}" for i in range(1000)]},
        "messages as large as may be": _chat(*["word " * 300] * 4000),
        "tools as large as may be": _chat("x", tools=_tools(MB - 1000)),
        "logit bias as large as may be": {"text_input": "x", "logit_bias": _bias(16_000)},
    }


def with_long_context(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint, said to take as long a prompt as the largest models."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def longest_gap(client: KimiClient) -> float:
    """Seconds between two responses of a stream."""
    times = [time.perf_counter() for _ in client.stream(**STREAM)]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def measure(served: Served, name: str, fields: dict[str, Any], seconds: float, repeats: int) -> dict[str, Any]:
    post_fields = functools.partial(json_post, served.ports["http"], GENERATE)
    bad, refused, new = post_fields(fields), post_fields({**fields, **REFUSED_BY_TRITON}), post_fields(NEW)
    with KimiClient(f"127.0.0.1:{served.ports['grpc']}") as client:
        questions = [
            Question(lambda: new.send()[1]),
            Question(lambda: seconds_of(lambda: client.generate(**NEW))),
            Question(lambda: longest_gap(client), max),
        ]
        disturbances = [functools.partial(sending, post) for post in (None, bad, refused)]
        alone, beside, floor = ask_in_turns(questions, disturbances, seconds)
    replies = [bad.send() for _ in range(repeats)]
    before = resident_mb(served), regions_mb(served)
    replies += [bad.send() for _ in range(repeats)]
    grown = {model: round(mb - before[0][model], 1) for model, mb in resident_mb(served).items()}
    rows = {"alone": alone, "beside": beside, "beside, refused by Triton": floor}
    return {
        "bad request": name,
        "status": sorted({status for status, _ in replies}),
        "answered in ms": round(1e3 * statistics.median(took for _, took in replies), 1),
        "new request over HTTP ms": {row: values[0] for row, values in rows.items()},
        "new request over gRPC ms": {row: values[1] for row, values in rows.items()},
        "longest gap of a stream ms": {row: values[2] for row, values in rows.items()},
        "memory grew MB": grown,
        "regions grew MB": round(regions_mb(served) - before[1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo/kimi-nano")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--only", nargs="+", choices=list(bad_requests()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = with_long_context(options.checkpoint.resolve(), folder / "checkpoint")
        served = opened.enter_context(serving(checkpoint, folder, max_model_len=MAX_MODEL_LEN))
        for name, fields in bad_requests().items():
            if options.only is None or name in options.only:
                rows.append(measure(served, name, fields, options.seconds, options.repeats))
                sys.stdout.write(json.dumps(rows[-1]) + "\n")
                sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
