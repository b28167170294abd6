"""`kimi bench`: measure a running server, or with --in-process the engine and both models in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_backend.cli.setting_options import read_settings, setting_options
from kimi_backend.errors import InvalidRequestError

if TYPE_CHECKING:
    from kimi_backend.cli.bench_server import ServerLoad
    from kimi_backend.cli.bench_trace import TraceLoad

Report = dict[str, Any]
Shown = Callable[[Report], None]
Drawn = Callable[[Report, Path], None]
TRACE, SWEEP = "Traces (server only)", "Sweeps (server only)"


@setting_options(without=("num_speculative_tokens", "max_num_seqs", "proposer"), panel="Settings (--in-process only)")
def bench_command(
    settings: dict[str, str],
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with prompt, messages or input_ids; by default eight short built-in ones."),
    ] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="Without a server.")] = False,
    url: Annotated[str, typer.Option(help="host:port of the server's gRPC endpoint.")] = "localhost:8001",
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=0, max=7, help="Draft tokens a step.")
    ] = 3,
    proposer: Annotated[
        str | None,
        typer.Option(help="Who proposes: none, eagle3, lookup or lookup+eagle3; by default all that the server has."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens of a request.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this mass.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Request i gets seed + i; by default any, in comparisons 0.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Do not stop at the end-of-sequence token.")] = False,
    num_requests: Annotated[int | None, typer.Option(min=1, help="By default one a prompt.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests that run together.")] = 16,
    compare_no_spec: Annotated[
        bool, typer.Option("--compare-no-spec", help="In turns with speculation and without; server only.")
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs of the load, of each side; by default 1, in comparisons 8 or more; server only."
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds after which a comparison begins no run beyond those it needs.")
    ] = 120.0,
    load_generator: Annotated[str, typer.Option(help="auto, perf_analyzer or own; server only.")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the result; server only.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Send a recorded load at its own times: Mooncake's JSON lines.", rich_help_panel=TRACE),
    ] = None,
    rate_scale: Annotated[float, typer.Option(min=1e-6, help="2 sends twice as fast.", rich_help_panel=TRACE)] = 1.0,
    length_scale: Annotated[
        float, typer.Option(min=1e-6, help="0.1 makes all lengths a tenth.", rich_help_panel=TRACE)
    ] = 1.0,
    trace_block: Annotated[
        int, typer.Option(min=1, help="Tokens that a hash id stands for.", rich_help_panel=TRACE)
    ] = 512,
    first_token_limit_ms: Annotated[
        float | None, typer.Option(min=0, help="Goodput: longest to the first token.", rich_help_panel=TRACE)
    ] = None,
    inter_token_limit_ms: Annotated[
        float | None, typer.Option(min=0, help="Goodput: longest mean time a token.", rich_help_panel=TRACE)
    ] = None,
    request_limit_ms: Annotated[
        float | None, typer.Option(min=0, help="Goodput: longest a request.", rich_help_panel=TRACE)
    ] = None,
    sweep_k: Annotated[
        str | None, typer.Option(help="Such as 0,1,3: each number of draft tokens …", rich_help_panel=SWEEP)
    ] = None,
    sweep_streams: Annotated[
        str | None, typer.Option(help="… with each number of streams, such as 1,4,16.", rich_help_panel=SWEEP)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run prompts or a trace; report acceptance, latencies, tokens a second and where the time of a step goes."""
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "ignore_eos": ignore_eos,
    }
    fields = sampling | {"num_speculative_tokens": num_speculative_tokens, "proposer": proposer}
    given = {name: value for name, value in fields.items() if value is not None}
    if in_process:
        if "checkpoint" not in settings:
            raise InvalidRequestError(
                "--checkpoint: not given, --in-process needs the folder of the target's checkpoint"
            )
        if compare_no_spec or plot is not None or trace is not None or sweep_k or sweep_streams:
            raise InvalidRequestError(
                "--compare-no-spec, --plot, --trace and --sweep-… go with a server, not with --in-process"
            )
        chosen = {"speculation_policy": "fixed", **settings, "max_num_seqs": str(concurrency)}
        if proposer is not None:
            chosen["proposer"] = proposer
        outcome = _bench_in_process(chosen, prompts, sampling, num_speculative_tokens, num_requests)
    elif settings:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in settings)
        raise InvalidRequestError(f"{names}: such settings go with --in-process; a server has its own")
    elif trace is not None:
        if compare_no_spec or sweep_k or sweep_streams or prompts is not None:
            raise InvalidRequestError("--trace: has its own prompts and load, no --prompts, comparison or sweep")
        from kimi_backend.cli.bench_trace import Limits, TraceLoad
        from kimi_backend.cli.trace_file import read_trace

        limits = Limits(
            first_token_ms=first_token_limit_ms, inter_token_ms=inter_token_limit_ms, request_ms=request_limit_ms
        )
        load = TraceLoad(
            url=url,
            sessions=read_trace(trace, num_requests),
            fields=given,
            rate_scale=rate_scale,
            length_scale=length_scale,
            block_size=trace_block,
            limits=limits,
        )
        outcome = _bench_trace(load)
    else:
        if bool(sweep_k) != bool(sweep_streams):
            raise InvalidRequestError("--sweep-k and --sweep-streams go together")
        if sweep_k and compare_no_spec:
            raise InvalidRequestError("--compare-no-spec: a sweep with k = 0 among its numbers compares already")
        server_load = _server_load(url, prompts, given, concurrency, num_requests, load_generator)
        if sweep_k and sweep_streams:
            outcome = _bench_sweep(server_load, sweep_k, sweep_streams, repeats)
        else:
            outcome = _bench_server(server_load, compare_no_spec, repeats, time_limit)
    report, show, draw = outcome
    if plot is not None:
        draw(report, plot)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report)


def _server_load(
    url: str,
    prompts: Path | None,
    fields: dict[str, Any],
    concurrency: int,
    num_requests: int | None,
    load_generator: str,
) -> "ServerLoad":
    from kimi_backend.cli.bench_server import ServerLoad
    from kimi_backend.cli.prompt_file import read_prompts

    requests = read_prompts(prompts)
    number = len(requests) if num_requests is None else num_requests
    # perf_analyzer refuses more streams than requests.
    streams = min(concurrency, number)
    return ServerLoad(
        url=url,
        prompts=requests,
        fields=fields,
        concurrency=streams,
        num_requests=number,
        load_generator=load_generator,
    )


def _bench_server(
    load: "ServerLoad", compare_no_spec: bool, repeats: int | None, time_limit: float
) -> tuple[Report, Shown, Drawn]:
    from kimi_backend.cli.bench_server import bench, print_table, write_plot

    return bench(load, compare_no_spec=compare_no_spec, repeats=repeats, limit_s=time_limit), print_table, write_plot


def _bench_trace(load: "TraceLoad") -> tuple[Report, Shown, Drawn]:
    from kimi_backend.cli.bench_trace import bench_trace, print_trace_table, write_trace_plot

    report, result = bench_trace(load)
    return report, print_trace_table, lambda report, plot: write_trace_plot(report, result, load.limits, plot)


def _bench_sweep(load: "ServerLoad", ks: str, streams: str, repeats: int | None) -> tuple[Report, Shown, Drawn]:
    from kimi_backend.cli.bench_sweep import parse_numbers, print_sweep_table, sweep, write_sweep_plot

    numbers = parse_numbers("--sweep-k", ks, 0, 7), parse_numbers("--sweep-streams", streams, 1, 4096)
    return sweep(load, *numbers, repeats), print_sweep_table, write_sweep_plot


def _bench_in_process(
    settings: dict[str, str], prompts: Path | None, sampling: dict[str, Any], k: int, num_requests: int | None
) -> tuple[Report, Shown, Drawn]:
    from kimi_backend.cli.bench_in_process import BenchLoad, print_report, run_bench
    from kimi_backend.types.request import SamplingParams

    load = BenchLoad(sampling=SamplingParams(**sampling), num_speculative_tokens=k, num_requests=num_requests)
    return run_bench(read_settings(settings, {}), prompts, load), print_report, lambda report, plot: None
