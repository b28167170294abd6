"""A request's name and parameters are read, whatever a client put into them."""

from types import SimpleNamespace

import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.incoming import MOST_PARAMETERS, parameters_text, read_parameters, request_name


def undecodable() -> str:
    return b"a\xff".decode()


def test_a_name_for_the_log() -> None:
    assert request_name(SimpleNamespace(request_id=lambda: "mine")) == "mine"
    assert request_name(SimpleNamespace(request_id=str)) == "request"
    assert request_name(SimpleNamespace(request_id=undecodable)) == "request"


def test_parameters_are_json_or_nothing() -> None:
    assert read_parameters(parameters_text(SimpleNamespace(parameters=lambda: '{"a": 1}'))) == {"a": 1}
    assert read_parameters(parameters_text(SimpleNamespace(parameters=str))) == {}
    with pytest.raises(InvalidRequestError, match=r"parameters: not valid UTF-8 \(.* at byte 1\)"):
        parameters_text(SimpleNamespace(parameters=undecodable))
    whole = "{" + ", ".join(f'"{n}": 1' for n in range(MOST_PARAMETERS // 2)) + "}"
    assert len(read_parameters(whole)) == MOST_PARAMETERS // 2
    with pytest.raises(InvalidRequestError, match="parameters"):
        read_parameters("{" + ", ".join(f'"{n}": 1' for n in range(2 * MOST_PARAMETERS)) + "}")
