"""Which hidden states of the target feed the draft: both checkpoint encodings become R(j).

R(j) is the residual stream entering the target's layer j, before its norm; R(num_hidden_layers) is the stream after
the last layer, before the final norm. A list whose first id is 1 counts layer outputs (id i means R(i + 1)); one whose
first id is 2 counts layer inputs (id i means R(i)). Any other first id is ambiguous and refused, unless the file's
`eagle_config.aux_layer_id_encoding` says "input" or "output", or the operator gives the R(j) explicitly.
"""

import itertools

from kimi_backend.config.json_fields import JsonFields
from kimi_backend.errors import ConfigError

AUX_LAYER_IDS_FIELD = "eagle_aux_hidden_state_layer_ids"
ENCODING_FIELD = "aux_layer_id_encoding"


def default_aux_layer_ids(num_hidden_layers: int) -> tuple[int, ...]:
    """(2, N // 2, N - 3), what EAGLE3 drafts are trained on when nothing else is said.

    Raises:
        ConfigError: the target is too shallow for three different layers.
    """
    ids = (2, num_hidden_layers // 2, num_hidden_layers - 3)
    if not 2 < ids[1] < ids[2]:
        raise ConfigError(
            f"{AUX_LAYER_IDS_FIELD} is missing and a target of {num_hidden_layers} layers has no default"
            " (2, N // 2, N - 3 needs at least 7); expected a list in the draft's config or an explicit aux_layer_ids"
        )
    return ids


def resolve_aux_layer_ids(
    fields: JsonFields, num_hidden_layers: int, override: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """The R(j) that a draft reads, lowest first.

    Args:
        fields: the object that holds `eagle_aux_hidden_state_layer_ids`: the draft's eagle_config or its top level.
        num_hidden_layers: of the target.
        override: explicit R(j); the file is then not consulted.
    Raises:
        ConfigError: the encoding is ambiguous, or an id does not exist in the target.
    """
    if override is not None:
        return _checked(override, num_hidden_layers, "draft override aux_layer_ids", override)
    listed = fields.integers(AUX_LAYER_IDS_FIELD)
    if not listed:
        return default_aux_layer_ids(num_hidden_layers)
    shift = _shift(fields, listed)
    subject = f"{fields.path}: {AUX_LAYER_IDS_FIELD}"
    return _checked(tuple(i + shift for i in listed), num_hidden_layers, subject, listed)


def _shift(fields: JsonFields, listed: tuple[int, ...]) -> int:
    if fields.has(ENCODING_FIELD):
        return 1 if fields.choice(ENCODING_FIELD, ("input", "output")) == "output" else 0
    if listed[0] not in (1, 2):
        raise fields.error(
            AUX_LAYER_IDS_FIELD,
            "a list that starts with 1 (layer outputs) or 2 (layer inputs);"
            f" else set {ENCODING_FIELD} or give aux_layer_ids explicitly",
        )
    return 2 - listed[0]


def _checked(ids: tuple[int, ...], num_hidden_layers: int, subject: str, given: tuple[int, ...]) -> tuple[int, ...]:
    rising = all(low < high for low, high in itertools.pairwise(ids))
    if not ids or not rising or ids[0] < 0 or ids[-1] > num_hidden_layers:
        raise ConfigError(
            f"{subject} is {list(given)}, meaning the residual stream entering layers {list(ids)};"
            f" expected rising layers from 0 to {num_hidden_layers}"
        )
    return ids
