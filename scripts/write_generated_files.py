"""Rewrite what is declared in code and repeated elsewhere: spec_ensemble's config.pbtxt, the client's fields, tables in
docs/, settings in docker/.

`make generated` runs it; a test fails when a file does not match.
"""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from kimi_backend.config.removed_settings import FORMER_NAMES, REMOVED_SETTINGS
from kimi_backend.config.settings import ENVIRONMENT_PREFIX, ServingSettings, describe_allowed
from kimi_backend.serving.metric_table import METRICS
from kimi_backend.serving.request_fields import ALIASES, INPUT_FIELDS, OUTPUT_FIELDS, Kind
from kimi_backend.serving.request_limits import LIMITS

ROOT = Path(__file__).resolve().parent.parent

NOT_IN_COMPOSE = {"checkpoint", "draft", "device", "tokenizer", "drain_file"}
"""Settings that compose.yaml or start.sh set themselves; the tokenizer is the checkpoint's own there."""

INSTANCE = "instance_group [ { kind: KIND_CPU, count: 1 } ]\n"
CONFIG_HEADER = """\
# Text in, text out: the orchestrator. A Python model that calls the other two (BLS), not platform "ensemble".
# The inputs and outputs are written by `make generated`; docs/protocol.md explains them.
name: "spec_ensemble"
backend: "python"
# Tools that send [[x]] and tools that send [x] both fit; batching happens inside, step by step.
max_batch_size: 1
model_transaction_policy { decoupled: true }
"""
UNARY_CONFIG_HEADER = """\
# spec_ensemble for clients that take one response, such as tritonclient's `infer`: it calls spec_ensemble (BLS).
# The inputs and outputs are written by `make generated`; docs/protocol.md explains them.
name: "spec_ensemble_unary"
backend: "python"
max_batch_size: 1
"""


def spec_ensemble_config(_: str) -> str:
    """model_repository/spec_ensemble/config.pbtxt, whole."""
    return CONFIG_HEADER + _inputs_and_outputs()


def unary_config(_: str) -> str:
    """model_repository/spec_ensemble_unary/config.pbtxt, whole."""
    return UNARY_CONFIG_HEADER + _inputs_and_outputs()


def _inputs_and_outputs() -> str:
    inputs = []
    for f in INPUT_FIELDS:
        dims = "[ -1 ]" if f.kind.is_list else "[ 1 ]"
        inputs.append(f'  {{ name: "{f.name}", data_type: {f.kind.data_type}, dims: {dims}, optional: true }}')
    outputs = [f'  {{ name: "{f.name}", data_type: {f.data_type}, dims: {f.dims} }}' for f in OUTPUT_FIELDS]
    return INSTANCE + "input [\n" + ",\n".join(inputs) + "\n]\noutput [\n" + ",\n".join(outputs) + "\n]\n"


NOT_IN_CLIENT = {
    *ALIASES,
    "return_num_input_tokens",
    "return_num_output_tokens",
    "exclude_input_in_output",
    "sampling_parameters",
}
"""Fields that are there for other servers' clients."""
CLIENT_TYPES = {
    Kind.TEXT: "str",
    Kind.TEXTS: "str | Sequence[str]",
    Kind.JSON: "Mapping[str, Any] | str",
    Kind.INT: "int",
    Kind.INTS: "Sequence[int]",
    Kind.UINT64: "int",
    Kind.FLOAT: "float",
    Kind.BOOL: "bool",
}
JSON_TYPES = {
    "messages": "Sequence[Mapping[str, Any]] | str",
    "tools": "Sequence[Mapping[str, Any]] | str",
    "logit_bias": "Mapping[int, float] | Mapping[str, float] | str",
}
CLIENT_HEADER = '''\
"""The fields that a request may carry; written by `make generated` from the server's table.

A copy, because this package imports nothing of the server.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class RequestFields(TypedDict, total=False):
    """Fields of a request; None leaves a field out. JSON fields are given as Python values, or as JSON text."""

'''


def client_fields(_: str) -> str:
    """client/kimi_client/_fields.py, whole."""
    fields = [f for f in INPUT_FIELDS if f.name not in NOT_IN_CLIENT]
    lines = []
    for f in fields:
        if f.name != "timeout_s":  # a parameter of its own
            lines.append(f"    {f.name}: {JSON_TYPES.get(f.name, CLIENT_TYPES[f.kind])} | None")
            lines.append(f'    """{f.meaning}"""')
    lines += ["", "", "INPUT_TYPES = {"]
    for f in fields:
        kind = f.kind.data_type.removeprefix("TYPE_").replace("STRING", "BYTES")
        lines.append(f'    "{f.name}": "{kind}",')
    json_fields = ", ".join(f'"{f.name}"' for f in fields if f.kind is Kind.JSON)
    lines += ["}", "JSON_INPUTS = frozenset(", f"    {{{json_fields}}}", ")"]
    return CLIENT_HEADER + "\n".join(lines) + "\n"


def _replace_settings(text: str, lines: list[str]) -> str:
    """Put lines between `# settings: …` and `# end of settings`, indented like the first."""
    before, start, rest = text.partition("# settings: written by `make generated`\n")
    indent = before.rpartition("\n")[2]
    _, end, after = rest.partition(f"{indent}# end of settings")
    return before + start + "".join(f"{indent}{line}\n" for line in lines) + end + after


def compose_file(text: str) -> str:
    """docker/compose.yaml, which hands every setting on."""
    # Former names are read, and one that is gone is refused where it is given.
    others = [ENVIRONMENT_PREFIX + name.upper() for name in (*FORMER_NAMES.values(), *REMOVED_SETTINGS)]
    return _replace_settings(text, [f"{name}: ${{{name}:-}}" for name in (*dict(_offered_settings()), *others)])


def env_example(text: str) -> str:
    """docker/.env.example, which explains every setting."""
    lines = []
    for name, effect in _offered_settings():
        lines += [*textwrap.wrap(effect, 118, initial_indent="# ", subsequent_indent="# "), f"{name}="]
    return _replace_settings(text, lines)


def _offered_settings() -> list[tuple[str, str]]:
    """(variable, effect) of each."""
    return [
        (ENVIRONMENT_PREFIX + field.name.upper(), field.metadata["effect"])
        for field in dataclasses.fields(ServingSettings)
        if field.name not in NOT_IN_COMPOSE
    ]


def _replace_table(text: str, name: str, rows: list[str]) -> str:
    """Put rows between `<!-- table: name -->` and `<!-- end -->`."""
    start = f"<!-- table: {name} -->\n"
    before, rest = text.split(start, 1)
    _, after = rest.split("<!-- end -->", 1)
    return before + start + "\n".join(rows) + "\n<!-- end -->" + after


def settings_page(text: str) -> str:
    """docs/settings.md with its table rewritten."""
    rows = ["| setting | variable | default | allowed | effect |", "| --- | --- | --- | --- | --- |"]
    for field in dataclasses.fields(ServingSettings):
        allowed = describe_allowed(field)
        default = f"`{field.default}`" if field.default != "" else "empty"
        variable = f"`{ENVIRONMENT_PREFIX}{field.name.upper()}`"
        rows.append(f"| `{field.name}` | {variable} | {default} | {allowed} | {field.metadata['effect']} |")
    removed = ["| setting | variable | instead |", "| --- | --- | --- |"]
    for name, instead in REMOVED_SETTINGS.items():
        removed.append(f"| `{name}` | `{ENVIRONMENT_PREFIX}{name.upper()}` | {instead} |")
    return _replace_table(_replace_table(text, "settings", rows), "removed settings", removed)


def protocol_page(text: str) -> str:
    """docs/protocol.md with its tables of inputs and outputs rewritten."""
    inputs = ["| input | type | meaning |", "| --- | --- | --- |"]
    for f in INPUT_FIELDS:
        shape = "[-1]" if f.kind.is_list else "[1]"
        inputs.append(f"| `{f.name}` | {f.kind.data_type.removeprefix('TYPE_')} {shape} | {f.meaning} |")
    outputs = ["| output | type | meaning |", "| --- | --- | --- |"]
    for o in OUTPUT_FIELDS:
        shape = o.dims.replace(" ", "")
        outputs.append(f"| `{o.name}` | {o.data_type.removeprefix('TYPE_')} {shape} | {o.meaning} |")
    limits = ["| input | most bytes | most elements or entries |", "| --- | --- | --- |"]
    for name, limit in LIMITS.items():
        most = (f"{value:,}" if value is not None else "" for value in (limit.num_bytes, limit.num_items))
        limits.append(f"| `{name}` | {' | '.join(most)} |")
    text = _replace_table(text, "limits", limits)
    return _replace_table(_replace_table(text, "inputs", inputs), "outputs", outputs)


def metrics_page(text: str) -> str:
    """docs/metrics.md with its table rewritten."""
    rows = ["| metric | type | label | vLLM name | meaning |", "| --- | --- | --- | --- | --- |"]
    for m in METRICS:
        label = "" if m.label is None else f"`{m.label}`: " + ", ".join(m.label_values)
        vllm_name = "" if m.vllm_name is None else f"`{m.vllm_name}`"
        rows.append(f"| `{m.name}` | {m.kind.value} | {label} | {vllm_name} | {m.meaning} |")
    return _replace_table(text, "metrics", rows)


def published_drafts_page(text: str) -> str:
    """docs/published_drafts.md with its table rewritten."""
    rows = ["| repository | config | form | outcome |", "| --- | --- | --- | --- |"]
    for entry in json.loads((ROOT / "tests/support/published_drafts.json").read_text()):
        config = entry["config"]
        rope = config.get("rope_scaling") or {}
        parts = ["MLA" if "kv_lora_rank" in config else f"{config['num_attention_heads']} heads"]
        if "kv_lora_rank" not in config:
            parts[0] += f", {config['num_key_value_heads']} of keys"
        parts += [f"{rope.get('rope_type') or rope.get('type') or 'mrope'} rope"] if rope else []
        parts += ["EAGLE3.1"] if config.get("fc_norm") else []
        whole = config.get("draft_vocab_size", config["vocab_size"]) == config["vocab_size"]
        parts += ["all tokens"] if whole else [f"{config['draft_vocab_size']:,} tokens"]
        outcome = f"refused: {entry['reason']}" if "reason" in entry else "right"
        rows.append(f"| {entry['repository']} | `{entry['path']}` | {', '.join(parts)} | {outcome} |")
    return _replace_table(text, "published drafts", rows)


def openai_page(text: str) -> str:
    """docs/openai.md with its tables rewritten."""
    # A host that only runs tests on a GPU need not have pydantic.
    from kimi_openai.request_fields import (
        IGNORED,
        INSTEAD,
        NO_VALUE,
        REFUSED,
        ChatRequest,
        CompletionRequest,
        GenerationRequest,
    )
    from kimi_openai.routes import ROUTES

    rows = ["| field | of | meaning |", "| --- | --- | --- |"]
    kinds = {"both": GenerationRequest, "chat": ChatRequest, "completions": CompletionRequest}
    for where, kind in kinds.items():
        for name, declared in kind.model_fields.items():
            if where != "both" and name in GenerationRequest.model_fields:
                continue
            is_extension = isinstance(declared.json_schema_extra, dict) and "is_extension" in declared.json_schema_extra
            rows.append(f"| `{name}`{' ⁺' if is_extension else ''} | {where} | {declared.description} |")
    refused = ["| field | accepted | instead |", "| --- | --- | --- |"]
    for name, allowed in REFUSED.items():
        shown = "nothing" if allowed is NO_VALUE else f"`{json.dumps(allowed)}`"
        refused.append(f"| `{name}` | {shown} | {INSTEAD.get(name, '')} |")
    ignored = ["| field | why |", "| --- | --- |", *(f"| `{name}` | {why} |" for name, why in IGNORED.items())]
    urls = ["| URL | does |", "| --- | --- |", *(f"| `{r.method} {r.path}` | {r.does} |" for r in ROUTES)]
    text = _replace_table(text, "urls", urls)
    text = _replace_table(_replace_table(text, "taken", rows), "refused", refused)
    return _replace_table(text, "ignored", ignored)


MARKERS = {
    "<|tool_calls_section_begin|>": "⟦section⟧",
    "<|tool_calls_section_end|>": "⟦/section⟧",
    "<|tool_call_section_begin|>": "⟦singular section⟧",
    "<|tool_call_section_end|>": "⟦/singular section⟧",
    "<|tool_call_begin|>": "⟦call⟧",
    "<|tool_call_argument_begin|>": "⟦arguments⟧",
    "<|tool_call_end|>": "⟦/call⟧",
    "<think>": "⟦think⟧",
    "</think>": "⟦/think⟧",
}


def tool_calls_page(text: str) -> str:
    """docs/tool_calls.md with the table of texts that the tests read."""
    sys.path.append(str(ROOT / "tests"))
    from support.reply_texts import TEXTS

    def shown(written: str) -> str:
        for letters, short in MARKERS.items():
            written = written.replace(letters, short)
        written = written.replace("\n", "\\n").replace("\u2028", "\\u2028").replace("|", "\\|")
        written = written if len(written) <= 180 else written[:120] + " … " + written[-50:]
        return f"`{written}`" if written else ""

    rows = ["| text | as the model writes it | thoughts | content | calls |", "| --- | --- | --- | --- | --- |"]
    for case in TEXTS:
        calls = [shown(f"{call[0]} {call[2]}") + ("" if call[3] else " incomplete") for call in case.expected[2]]
        name = f"{case.name}; the prompt begins to think" if case.thinks else case.name
        cells = [name, shown(case.marked), shown(case.reasoning), shown(case.content), "<br>".join(calls)]
        rows.append(f"| {' | '.join(cells)} |")
    return _replace_table(text, "texts", rows)


GENERATED: dict[str, Callable[[str], str]] = {
    "model_repository/spec_ensemble/config.pbtxt": spec_ensemble_config,
    "model_repository/spec_ensemble_unary/config.pbtxt": unary_config,
    "client/kimi_client/_fields.py": client_fields,
    "docker/compose.yaml": compose_file,
    "docker/.env.example": env_example,
    "docs/settings.md": settings_page,
    "docs/protocol.md": protocol_page,
    "docs/metrics.md": metrics_page,
    "docs/openai.md": openai_page,
    "docs/published_drafts.md": published_drafts_page,
    "docs/tool_calls.md": tool_calls_page,
}


def main() -> None:
    for name, write in GENERATED.items():
        path = ROOT / name
        path.write_text(write(path.read_text()))


if __name__ == "__main__":
    main()
