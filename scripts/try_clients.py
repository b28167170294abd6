"""Runs clients that other people wrote against a server and prints a table; scripts/try_clients.sh starts it."""

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "def fibonacci(n):"
TIMEOUT_S = 300
NUM_REQUESTS = 8


class Addresses(argparse.Namespace):
    """The addresses at which the server listens."""

    grpc: str
    openai: str
    work: Path


def by_openai(at: Addresses) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{at.openai}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="kimi", messages=[{"role": "user", "content": QUESTION}], max_tokens=24, stream=True, seed=1,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    return f"{chunks[-1].usage.completion_tokens} tokens in {len(chunks)} chunks"


def by_litellm(at: Addresses) -> str:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
    import litellm

    reply = litellm.completion(
        model="openai/kimi", api_base=f"{at.openai}/v1", api_key="none", max_tokens=24,
        messages=[{"role": "user", "content": QUESTION}],
    )  # fmt: skip
    return f"{reply.usage.completion_tokens} tokens, finish_reason {reply.choices[0].finish_reason}"


def by_llama_index(at: Addresses) -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="kimi", api_base=f"{at.openai}/v1", api_key="none", is_chat_model=True, max_tokens=24,
        additional_kwargs={"extra_body": {"chat_template_kwargs": {"thinking": False}}},
    )  # fmt: skip
    pieces = list(model.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    return f"{len(pieces[-1].message.content)} characters in {len(pieces)} pieces"


def by_langchain(at: Addresses) -> str:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="kimi", base_url=f"{at.openai}/v1", api_key="none", max_tokens=24)
    return f"{model.invoke(QUESTION).usage_metadata['output_tokens']} tokens"


def _thing() -> Any:
    """A class whose every value is short."""
    from typing import Literal

    from pydantic import BaseModel, Field

    class Thing(BaseModel):
        """A thing that is looked for."""

        kind: Literal["stack", "queue"]
        size: int = Field(ge=0, le=99)
        note: str = Field(max_length=8)
        parts: list[Literal["a", "b"]] = Field(max_length=2)

    return Thing


def by_openai_parse(at: Addresses) -> str:
    import openai

    thing, client = _thing(), openai.OpenAI(base_url=f"{at.openai}/v1", api_key="none")
    ask = {
        "model": "kimi", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "seed": 1,
        "extra_body": {"chat_template_kwargs": {"thinking": False}},
    }  # fmt: skip
    content = client.chat.completions.parse(**ask, response_format=thing).choices[0].message.parsed
    tools = [openai.pydantic_function_tool(thing)]
    reply = client.chat.completions.parse(**ask, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    parsed = call.function.parsed_arguments
    assert isinstance(content, thing) and isinstance(parsed, thing)
    return f"size {content.size} as content, {parsed.size} as a call"


def by_langchain_structured(at: Addresses) -> str:
    from langchain_openai import ChatOpenAI

    thing = _thing()
    model = ChatOpenAI(
        model="kimi", base_url=f"{at.openai}/v1", api_key="none", max_tokens=200, seed=1,
        extra_body={"chat_template_kwargs": {"thinking": False}},
    )  # fmt: skip
    methods = ("json_schema", "function_calling")
    found = [model.with_structured_output(thing, method=method).invoke(QUESTION) for method in methods]
    assert all(isinstance(each, thing) for each in found)
    return ", ".join(f"size {each.size} by {method}" for each, method in zip(found, methods, strict=True))


def _inputs(grpcclient: Any) -> list[Any]:
    import numpy as np

    values = {
        "text_input": ("BYTES", np.array([[QUESTION.encode()]], np.object_)),
        "max_tokens": ("INT32", np.array([[24]], np.int32)),
        "stream": ("BOOL", np.array([[True]])),
    }
    inputs = []
    for name, (kind, array) in values.items():
        inputs.append(grpcclient.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def _count(results: list[Any]) -> str:
    tokens = sum(int(result.as_numpy("num_output_tokens").item()) for result in results)
    return f"{tokens} tokens in {len(results)} responses"


def by_tritonclient(at: Addresses) -> str:
    import queue

    import tritonclient.grpc as grpcclient

    came: queue.Queue[Any] = queue.Queue()
    results = []
    with grpcclient.InferenceServerClient(at.grpc) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer("spec_ensemble", _inputs(grpcclient), enable_empty_final_response=True)
        while True:
            result = came.get(timeout=60)
            if isinstance(result, Exception):
                raise result
            results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return _count(results)


def by_tritonclient_aio(at: Addresses) -> str:
    import tritonclient.grpc.aio as grpcclient

    async def run() -> str:
        async def requests() -> Any:
            yield {
                "model_name": "spec_ensemble",
                "inputs": _inputs(grpcclient),
                "enable_empty_final_response": True,
            }

        results = []
        async with grpcclient.InferenceServerClient(at.grpc) as client:
            async for result, error in client.stream_infer(requests()):
                if error is not None:
                    raise error
                results.append(result)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
        return _count(results)

    return asyncio.run(run())


LIBRARIES: dict[str, tuple[str, str, Callable[[Addresses], str]]] = {
    "openai": ("openai", "`chat.completions.create(stream=True)`", by_openai),
    "openai, parsed": (
        "openai",
        "`chat.completions.parse(response_format=…)`, `parse(tools=…, tool_choice=…)`",
        by_openai_parse,
    ),
    "LangChain, structured": (
        "langchain-openai",
        "`with_structured_output(…)`, by json_schema and function_calling",
        by_langchain_structured,
    ),
    "LiteLLM": ("litellm", '`completion(model="openai/kimi", api_base=…)`', by_litellm),
    "LlamaIndex": ("llama-index-llms-openai-like", "`OpenAILike(…).stream_chat`", by_llama_index),
    "LangChain": ("langchain-openai", "`ChatOpenAI(…).invoke`", by_langchain),
    "tritonclient": ("tritonclient", "`grpc`: `start_stream`, `async_stream_infer`", by_tritonclient),
    "tritonclient (asyncio)": ("tritonclient", "`grpc.aio`: `stream_infer`", by_tritonclient_aio),
}
LM_EVAL = (
    "lm_eval --model local-completions --batch_size 64"
    " --model_args model=kimi,base_url=OPENAI/v1/completions,tokenizer=TOKENIZER"
    " --include_path benchmarks/lm_eval_tasks"
)
PROGRAMS = {
    "perf_analyzer": (
        "tritonclient 2.51.0's",
        "perf_analyzer -m spec_ensemble -x 1 -u GRPC -i grpc --async --streaming"
        " --input-data benchmarks/prompts.json --concurrency-range 2 --request-count 8",
    ),
    "AIPerf, chat": (
        "aiperf",
        "aiperf profile -m kimi --url OPENAI --endpoint-type chat --streaming --tokenizer TOKENIZER"
        " --concurrency 2 --request-count 8 --isl 32 --osl 16 --ui none",
    ),
    "genai-perf, chat": (
        "genai-perf",
        "genai-perf profile -m kimi --endpoint-type chat --url OPENAI --streaming --tokenizer TOKENIZER"
        " --concurrency 2 --request-count 8 --synthetic-input-tokens-mean 32 --output-tokens-mean 16"
        ' --extra-inputs {"chat_template_kwargs":{"thinking":false}}',
    ),
    "genai-perf, Triton": (
        "genai-perf",
        "genai-perf profile -m spec_ensemble --endpoint-type kserve --backend tensorrtllm --url GRPC --streaming"
        " --tokenizer TOKENIZER --concurrency 2 --request-count 8 --synthetic-input-tokens-mean 32"
        " --output-tokens-mean 16",
    ),
    "lm_eval, generated": ("lm_eval", LM_EVAL + " --tasks local_arithmetic"),
    "lm_eval, scored": ("lm_eval", LM_EVAL + " --tasks local_arithmetic_choice"),
}


def write_tokenizer(folder: Path) -> None:
    """kimi-nano's vocabulary as a tokenizer.json: the programs count tokens with Hugging Face's library."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    end = "<|endoftext|>"
    converted = TikTokenConverter(
        vocab_file=str(ROOT / "demo/kimi-nano/tiktoken.model"), pattern=pattern, extra_special_tokens=[end]
    ).converted()
    PreTrainedTokenizerFast(tokenizer_object=converted, eos_token=end).save_pretrained(folder)


def run_program(command: str, at: Addresses) -> str:
    """The end of what it printed; its figures are not the point here."""
    own = {"GRPC": at.grpc, "OPENAI": at.openai, "TOKENIZER": str(at.work / "tokenizer")}
    words = command.split()
    for name, value in own.items():
        words = [word.replace(name, value) for word in words]
    is_lm_eval = words[0] == "lm_eval"  # its tasks name their file from the repository's root
    if not is_lm_eval:
        words = [word.replace("benchmarks/", f"{ROOT}/benchmarks/") for word in words]
    folder = Path(sys.executable).parent
    if (folder / words[0]).exists() and words[0] != "perf_analyzer":
        words[0] = str(folder / words[0])
    done = subprocess.run(
        words,
        cwd=ROOT if is_lm_eval else at.work,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(at.work / "huggingface")} if is_lm_eval else None,
    )
    (at.work / f"{words[0].rpartition('/')[2]}.log").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    if is_lm_eval:
        return measured(done.stdout)
    return (
        checked_report(at.work) if words[0].endswith(("aiperf", "genai-perf")) else f"{NUM_REQUESTS} requests, no error"
    )


def measured(table: str) -> str:
    """The metrics and values of the table that lm_eval prints: columns behind the metric's arrow are its value."""
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if "↑" in line or "↓" in line]
    found = [(row[i - 1], row[i + 1]) for row in cells for i, cell in enumerate(row) if cell in ("↑", "↓")]
    if not found:
        raise RuntimeError(f"no result: {table[-1500:]}")
    return ", ".join(f"{name} {value}" for name, value in found)


def checked_report(work: Path) -> str:
    """Read what the newest report of AIPerf or genai-perf counted; both exit with 0 also when requests failed."""
    reports = [*work.rglob("profile_export_aiperf.json"), *work.rglob("*genai_perf.json")]
    report = json.loads(max(reports, key=lambda path: path.stat().st_mtime).read_text())
    done, errors = report["request_count"]["avg"], report.get("error_summary") or []
    if done != NUM_REQUESTS or errors:
        raise RuntimeError(f"{done:g} of {NUM_REQUESTS} requests were answered: {errors}")
    return f"{done:g} requests, no error"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--openai", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", action="append", help="may be given again")
    at = parser.parse_args(namespace=Addresses())
    if not at.only or PROGRAMS.keys() & set(at.only):
        write_tokenizer(at.work / "tokenizer")
    works = {name: (each[0], each[1], lambda each=each: each[2](at)) for name, each in LIBRARIES.items()}
    works |= {n: (v, f"`{shlex.join(c.split())}`", lambda c=c: run_program(c, at)) for n, (v, c) in PROGRAMS.items()}
    say("| client | version | what | result |\n| --- | --- | --- | --- |")
    failed = False
    for name, (package, what, work) in works.items():
        if at.only and name not in at.only:
            continue
        start = time.perf_counter()
        try:
            result = work()
        except Exception as error:
            failed, result = True, "failed"
            sys.stderr.write(f"{name}: {error!r}\n")
        version = package if " " in package else metadata.version(package)
        say(f"| {name} | {version} | {what} | {result} |")
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.1f} s\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
