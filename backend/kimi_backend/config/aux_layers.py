"""The hidden states of the target that feed the draft: both checkpoint encodings become R(j).

R(j) is the residual stream entering the target's layer j, before its norm; R(num_hidden_layers) is the stream after
the last layer, before the final norm. A list whose first id is 1 counts layer outputs (id i means R(i + 1)); one whose
first id is 2 counts layer inputs (id i means R(i)). Any other first id is ambiguous and taken as layer inputs, as
other servers take every list, with a warning. The file's `eagle_config.aux_layer_id_encoding` ("input" or "output"),
or the operator, says it for certain.
"""

import itertools
from typing import NamedTuple

from kimi_backend.config.json_fields import JsonFields
from kimi_backend.errors import ConfigError

AUX_LAYER_IDS_FIELD = "eagle_aux_hidden_state_layer_ids"
ENCODING_FIELD = "aux_layer_id_encoding"


class AuxLayers(NamedTuple):
    """The R(j) that a draft reads, lowest first, and by which rule."""

    ids: tuple[int, ...]
    rule: str


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


def resolve_aux_layers(
    fields: JsonFields, num_hidden_layers: int, override: tuple[int, ...] | None = None
) -> AuxLayers:
    """
    Args:
        fields: the object that holds `eagle_aux_hidden_state_layer_ids`: the draft's eagle_config or its top level.
        num_hidden_layers: of the target.
        override: explicit R(j); the file is then not consulted.
    Raises:
        ConfigError: an id does not exist in the target.
    """
    listed = fields.integers(AUX_LAYER_IDS_FIELD)
    encoding = fields.choice(ENCODING_FIELD, ("input", "output")) if fields.has(ENCODING_FIELD) else None
    if override is not None:
        ids = _checked(override, num_hidden_layers, "draft override aux_layer_ids", override)
        return AuxLayers(ids, "set by the operator")
    if not listed:
        return AuxLayers(default_aux_layer_ids(num_hidden_layers), "the default, since the file lists none")
    shift, rule = _shift(fields, listed, encoding)
    subject = f"{fields.path}: {AUX_LAYER_IDS_FIELD}"
    ids = _checked(tuple(i + shift for i in listed), num_hidden_layers, subject, listed)
    return AuxLayers(ids, f"{rule} {list(listed)}")


def _shift(fields: JsonFields, listed: tuple[int, ...], encoding: str | None) -> tuple[int, str]:
    if encoding is not None:
        return (1 if encoding == "output" else 0), f"{ENCODING_FIELD} {encoding} of"
    if listed[0] == 1:
        return 1, "layer outputs, as the first id says,"
    if listed[0] != 2:
        fields.warn(
            f"{AUX_LAYER_IDS_FIELD} {list(listed)} starts with neither 1 (layer outputs) nor 2 (layer inputs) and is"
            f" taken as layer inputs; `kimi probe` tells, {ENCODING_FIELD} or the setting aux_layer_ids sets it"
        )
    return 0, "layer inputs,"


def _checked(ids: tuple[int, ...], num_hidden_layers: int, subject: str, given: tuple[int, ...]) -> tuple[int, ...]:
    rising = all(low < high for low, high in itertools.pairwise(ids))
    if not ids or not rising or ids[0] < 0 or ids[-1] > num_hidden_layers:
        raise ConfigError(
            f"{subject} is {list(given)}, meaning the residual stream entering layers {list(ids)};"
            f" expected rising layers from 0 to {num_hidden_layers}"
        )
    return ids
