"""Server settings: one declaration each, read once from model parameters and environment variables.

A setting `x` is taken from the model's config.pbtxt parameter `x` when that is not empty, else from the environment
variable `KIMI_X`, else from its default. The models of one server see the same environment, so `kimi serve` and
docker compose set variables; a parameter in a config.pbtxt overrides them for that model alone.

    python -m kimi_backend.config.settings      0, or 2 and the reason, of this process's environment
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from kimi_backend.config.removed_settings import FORMER_NAMES, REMOVED_SETTINGS, REMOVED_VALUES
from kimi_backend.errors import ConfigError
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS

ENVIRONMENT_PREFIX = "KIMI_"
MOST_UNARY_CALLS = 128
"""The calls of `spec_ensemble_unary` that may be under way; Triton Server holds a thread for each."""


def _setting(default: Any, effect: str, **bounds: Any) -> Any:
    return dataclasses.field(default=default, metadata={"effect": effect, **bounds})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """Everything that an operator can set. docs/settings.md lists the same, checked by a test."""

    checkpoint: str = _setting("", "Folder of the target's checkpoint. Required.")
    draft: str = _setting("", "Folder of the draft's checkpoint; empty serves without speculation.")
    tokenizer: str = _setting("", "Folder of the tokenizer and chat template; empty takes the checkpoint's.")
    load_format: str = _setting(
        "safetensors",
        "`dummy` makes random weights of the geometry in config.json on the device and reads no weights; for timing.",
        choices=("safetensors", "dummy"),
    )
    routing: str = _setting(
        "model",
        "`uniform` sends every token to experts drawn at random, whatever the router says; for timing.",
        choices=("model", "uniform"),
    )
    synthetic_acceptance: float = _setting(
        0.0,
        "Accepts draft tokens at random so that a round emits this many tokens on average; 0 compares. For timing.",
        minimum=0,
        maximum=MAX_SPECULATIVE_TOKENS + 1,
    )
    synthetic_chances: str = _setting(
        "",
        "Comma-separated chances that draft token 1, 2, and so on is accepted when those before it were; further ones"
        " 0.71 times the one before. Unlike `synthetic_acceptance` they do not depend on k. For timing.",
    )
    device: str = _setting("auto", "Where both models run.", choices=("auto", "cpu", "cuda"))
    cpu_threads: int = _setting(
        1, "Threads of each model on a CPU. Another number may change the last bits of a logit.", minimum=1
    )
    kernels: str = _setting(
        "auto",
        "Kernel set: `plain` is row-invariant and holds matrices in float32, on a CPU and on a GPU; `triton` is for a"
        " GPU, and faster there.",
        choices=("auto", "plain", "triton"),
    )
    tensor_parallel_size: int = _setting(
        1, "GPUs that share both models, each GPU in a process of its own. On a CPU: processes.", minimum=1
    )
    proposer: str = _setting(
        "",
        "Who proposes tokens: the draft (`eagle3`), the text itself (`lookup`: what followed where its last tokens"
        " stood before; needs no draft), for each sequence the better of both, or nobody. Empty: `eagle3` with a"
        " draft, else `none`. A request may ask for less. Changes speed, never text.",
        choices=("", *(proposer.value for proposer in Proposer)),
    )
    lookup_min_match: int = _setting(
        4, "Tokens that must stand again before `lookup` proposes what followed them.", minimum=1, maximum=64
    )
    lookup_memory_mib: int = _setting(
        1024,
        "Host memory that the indexes of `lookup` may take together, 9 to 18 bytes a token of each request; one that"
        " finds no room is served without.",
        minimum=1,
    )
    lookup_pool_mib: int = _setting(
        0,
        "Host memory for texts of ended requests, in which `lookup` finds what requests of the same `cache_salt` say"
        " next, the latest eight of each; 0 keeps none.",
        minimum=0,
    )
    num_speculative_tokens: int = _setting(
        3,
        "Draft tokens a step where a request names no number; `adaptive` goes up to max_speculative_tokens then,"
        " but not from 0.",
        minimum=0,
        maximum=MAX_SPECULATIVE_TOKENS,
    )
    max_speculative_tokens: int = _setting(
        MAX_SPECULATIVE_TOKENS, "Most draft tokens a request may ask for.", minimum=0, maximum=MAX_SPECULATIVE_TOKENS
    )
    speculation_policy: str = _setting(
        "adaptive",
        "`adaptive` drafts as many tokens as is fastest by what steps cost and how often the draft is right, at most"
        " what the request asks for, none where that is fastest; `fixed` drafts what it asks for.",
        choices=("adaptive", "fixed"),
    )
    block_size: int = _setting(64, "Tokens in a KV block, of both pools.", choices=(16, 32, 64, 128))
    kv_tokens: int = _setting(0, "Tokens that the KV pools hold; 0 takes what the memory plan allows.", minimum=0)
    kv_cache_dtype: str = _setting(
        "auto",
        "KV element type; auto follows the device. `fp8` (e4m3) halves the bytes of a GPU's caches.",
        choices=("auto", "float32", "bfloat16", "fp8"),
    )
    kv_scale: float = _setting(
        1.0,
        "An fp8 cache holds a value divided by this. Latents are normed, an MHA draft's keys far below 448: 1 fits.",
        minimum=1e-6,
    )
    enforce_eager: str = _setting(
        "false", "`true` captures no CUDA graphs: a faster start, slower steps.", choices=("false", "true")
    )
    async_scheduling: str = _setting(
        "true",
        "Whether steps of target and draft are launched before the host knows what they read of each other and of the"
        " step before, which then stays on the GPU. Changes speed, never text.",
        choices=("true", "false"),
    )
    shared_semaphores: str = _setting(
        "auto",
        "With `async_scheduling`, between two processes on the same GPUs: whether their streams wait for each other's"
        " steps, so that neither host has to. `auto` does it where it can. Changes speed, never text.",
        choices=("auto", "off"),
    )
    capture_batch_sizes: str = _setting(
        "", "Comma-separated numbers of sequences that steps are captured for; empty: 1, 2, 3, 4, 6, 8, 12, and so on."
    )
    gpu_memory_gib: float = _setting(
        0.0, "GPU memory to plan for, in GiB; 0 takes 92 % of the card.", minimum=0, maximum=1_000_000
    )
    max_model_len: int = _setting(0, "Longest sequence in tokens; 0 takes the checkpoint's limit.", minimum=0)
    max_num_seqs: int = _setting(64, "Most sequences in a step.", minimum=1)
    max_num_batched_tokens: int = _setting(2048, "Most rows in a step.", minimum=16)
    max_prompt_tokens_beside_decode: int = _setting(
        512,
        "Most rows of prompts in a step in which a sequence decodes, which waits for them; 0: as many as"
        " `max_num_batched_tokens` leaves.",
        minimum=0,
    )
    max_queue_size: int = _setting(1024, "Requests that may wait; more get UNAVAILABLE.", minimum=1)
    default_max_tokens: int = _setting(
        0, "Output tokens where a request names no number; 0 allows up to max_model_len.", minimum=0
    )
    target_patience_s: float = _setting(
        0.1, "Seconds that live requests wait for a lost target before they end with an error.", minimum=0
    )
    drain_timeout_s: float = _setting(10.0, "Seconds that a shutdown waits for live requests to end.", minimum=0)
    drain_file: str = _setting(
        "", "When this file appears, new requests are refused; live ones have the seconds that it holds, or none."
    )
    aux_layer_ids: str = _setting("", "Comma-separated R(j) to capture; empty reads the draft's config.")
    draft_rope_theta: float = _setting(0.0, "Overrides the draft's rope_theta; 0 reads its config.", minimum=0)
    draft_beta_fast: float = _setting(0.0, "Overrides the draft's yarn beta_fast; 0 reads its config.", minimum=0)
    draft_interleaved: str = _setting("", "Overrides the draft's rotary pairing.", choices=("", "true", "false"))
    draft_fc_norm: str = _setting("", "Overrides the draft's fc_norm flag.", choices=("", "true", "false"))
    draft_norm_output: str = _setting("", "Overrides the draft's norm_output flag.", choices=("", "true", "false"))
    draft_max_positions: int = _setting(
        0,
        "Tokens of a sequence beyond which nothing is drafted for it, for a draft that was trained for less than the"
        " target's length; 0: no bound. Changes speed, never text.",
        minimum=0,
    )
    probe_at_start: str = _setting(
        "warn",
        "After the start the target goes on with four short prompts; `warn` says in the log if it accepts next to"
        " nothing of the draft, with the command that finds the right settings. `off` does not ask.",
        choices=("warn", "off"),
    )
    draft_vocab: int = _setting(
        0, "Most frequent tokens that the draft's head keeps; 0 keeps all. Changes speed, never text.", minimum=0
    )
    draft_vocab_counts: str = _setting(
        "", "File of `kimi count-tokens` for draft_vocab; empty takes token_counts.json in the draft's folder."
    )
    draft_quantization: str = _setting(
        "none",
        "Format that the draft's linear layers are rounded to at load. Changes speed, never text.",
        choices=("none", "fp8", "int4"),
    )
    draft_head_quantization: str = _setting(
        "",
        "Format of the draft's head alone; empty takes draft_quantization. int4 costs a head next to no acceptance.",
        choices=("", "none", "fp8", "int4"),
    )
    aux_transfer: str = _setting(
        "auto",
        "How aux hidden states reach the draft: `ipc` in a GPU buffer that both processes map, `tensor` through the"
        " server; auto takes the buffer where it can.",
        choices=("auto", "ipc", "tensor"),
    )
    unary: str = _setting(
        "false",
        "`true` loads `spec_ensemble_unary` too, for clients that take one response. Under load Triton Server 24.10's"
        " own process of it may crash: its calls fail then, until it is loaded again.",
        choices=("false", "true"),
    )
    metrics_interval_s: float = _setting(
        0.25, "Seconds between updates of the custom metrics; 0 turns them off.", minimum=0
    )
    log_level: str = _setting("INFO", "Least severe log record shown.", choices=("DEBUG", "INFO", "WARNING", "ERROR"))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), field.metadata)
        if 0 < self.synthetic_acceptance < 1:
            raise ConfigError(
                f"setting synthetic_acceptance: {self.synthetic_acceptance} given, 0 or at least 1 is allowed:"
                " a round emits the target's own token too"
            )

        if not self.draft and self.proposer and Proposer(self.proposer).uses_draft:
            raise ConfigError(
                f"setting proposer: {self.proposer!r} given, 'none' or 'lookup' is allowed without a draft"
            )
        if self.synthetic_chances and not (0 <= min(self.accepted_chances) <= max(self.accepted_chances) <= 1):
            raise ConfigError(f"setting synthetic_chances: {self.synthetic_chances!r} given, 0 to 1 is allowed")

    @property
    def chosen_proposer(self) -> Proposer:
        """`proposer`, resolved."""
        return Proposer(self.proposer) if self.proposer else Proposer.EAGLE3 if self.draft else Proposer.NONE

    @property
    def most_draft_tokens(self) -> int:
        """Most tokens that a verify checks of a sequence, whoever proposes them."""
        return self.max_speculative_tokens if self.draft or self.chosen_proposer.uses_lookup else 0

    @property
    def lookup_bytes(self) -> int:
        """Host memory of the indexes of `lookup`."""
        return self.lookup_memory_mib << 20 if self.chosen_proposer.uses_lookup else 0

    @property
    def lookup_pool_bytes(self) -> int:
        """Host memory of the texts of ended requests."""
        return self.lookup_pool_mib << 20 if self.chosen_proposer.uses_lookup else 0

    @property
    def accepted_chances(self) -> tuple[float, ...]:
        """`synthetic_chances`; empty without. Raises ConfigError: no number."""
        return tuple(_parse("synthetic_chances", text, float) for text in self.synthetic_chances.split(",") if text)

    @property
    def synthetic_parts(self) -> tuple[str, ...]:
        """The things that are not real in a server with these settings; every output repeats it. Empty in service."""
        said = []
        if self.load_format == "dummy":
            said.append("weights dummy")
        if self.routing == "uniform":
            said.append("routing uniform")
        if self.synthetic_acceptance:
            said.append(f"acceptance length synthetic {self.synthetic_acceptance:g}")
        if self.synthetic_chances:
            said.append(f"acceptance by position synthetic {self.synthetic_chances}")
        return tuple(said)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], environment: Mapping[str, str]) -> "ServingSettings":
        """Read every setting; unknown parameters are refused.

        Args:
            parameters: config.pbtxt parameters, name -> string value.
            environment: usually `os.environ`.

        Raises:
            ConfigError: a name nobody knows or that is gone, or a value that does not parse or is out of range.
        """
        _refuse_removed(parameters, environment)
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(parameters) - {*known, *FORMER_NAMES.values(), *REMOVED_SETTINGS} - _SERVER_OWN_PARAMETERS)
        if unknown:
            raise ConfigError(f"parameter {unknown[0]!r} is not a setting; known: {', '.join(known)}")
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for name in known:
            text = _given(name, parameters, environment)
            if text:
                values[name] = _parse(name, text, hints[name])
        return cls(**values)


def describe_allowed(field: "dataclasses.Field[Any]") -> str:
    """The values that a setting may have, for a reader."""
    bounds = field.metadata
    if "choices" in bounds:
        return ", ".join(f"`{c}`" if c else "empty" for c in map(str, bounds["choices"]))
    if "minimum" in bounds:
        return f"{bounds['minimum']} to {bounds['maximum']}" if "maximum" in bounds else f"≥ {bounds['minimum']}"
    return "text"


_SERVER_OWN_PARAMETERS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})


def _refuse_removed(parameters: Mapping[str, str], environment: Mapping[str, str]) -> None:
    for name, instead in REMOVED_SETTINGS.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        given = name if parameters.get(name) else variable if environment.get(variable) else None
        if given is not None:
            raise ConfigError(f"setting {given} was removed: {instead}")


def _given(name: str, parameters: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The text that is given for a setting, by its own name before its former one; empty for none."""
    names = [known for known in (name, FORMER_NAMES.get(name)) if known]
    texts = [parameters.get(known) or environment.get(ENVIRONMENT_PREFIX + known.upper()) for known in names]
    return next((text for text in texts if text), "")


def _parse(name: str, text: str, kind: type | types.UnionType) -> Any:
    try:
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
    except ValueError:
        raise ConfigError(f"setting {name}: {text!r} given, a number is needed") from None
    return text


def _check(name: str, value: Any, bounds: Mapping[str, Any]) -> None:
    choices, minimum, maximum = bounds.get("choices"), bounds.get("minimum"), bounds.get("maximum")
    if (name, value) in REMOVED_VALUES:
        raise ConfigError(f"setting {name}: {value!r} was removed: {REMOVED_VALUES[name, value]}")
    if choices is not None and value not in choices:
        allowed = ", ".join(repr(c) for c in choices)
        raise ConfigError(f"setting {name}: {value!r} given, one of {allowed} is allowed")
    if minimum is not None and not value >= minimum:
        raise ConfigError(f"setting {name}: {value} given, at least {minimum} is allowed")
    if maximum is not None and value > maximum:
        raise ConfigError(f"setting {name}: {value} given, at most {maximum} is allowed")
