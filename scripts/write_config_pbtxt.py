"""Write spec_ensemble's config.pbtxt from the request surface declared in code."""

from pathlib import Path

from kimi_backend.serving.request_fields import INPUT_FIELDS, OUTPUT_FIELDS

HEADER = """\
# Text in, text out: the orchestrator. A Python model that calls the other two (BLS), not platform "ensemble".
# The inputs and outputs are written by scripts/write_config_pbtxt.py; docs/protocol.md explains them.
name: "spec_ensemble"
backend: "python"
# Tools that send [[x]] and tools that send [x] both fit; batching happens inside, step by step.
max_batch_size: 1
model_transaction_policy { decoupled: true }
instance_group [ { kind: KIND_CPU, count: 1 } ]
"""


def spec_ensemble_config() -> str:
    """The whole file."""
    inputs = []
    for f in INPUT_FIELDS:
        dims = "[ -1 ]" if f.kind.is_list else "[ 1 ]"
        inputs.append(f'  {{ name: "{f.name}", data_type: {f.kind.data_type}, dims: {dims}, optional: true }}')
    outputs = [f'  {{ name: "{f.name}", data_type: {f.data_type}, dims: {f.dims} }}' for f in OUTPUT_FIELDS]
    return HEADER + "input [\n" + ",\n".join(inputs) + "\n]\noutput [\n" + ",\n".join(outputs) + "\n]\n"


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    (root / "model_repository/spec_ensemble/config.pbtxt").write_text(spec_ensemble_config())
