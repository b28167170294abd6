"""`kimi openai`: what its options and variables, and those of the server, make of the endpoint."""

import pytest

pytest.importorskip("kimi_openai")

from typer.testing import CliRunner

from kimi_backend.cli import openai_endpoint
from kimi_backend.cli.main import app
from kimi_backend.errors import ConfigError
from kimi_openai.api_keys import ApiKey


@pytest.fixture
def given(monkeypatch):
    """Settings and further arguments of each endpoint that was started; of its variables none is set."""
    started = []
    for name in ("API_KEY", "API_KEYS_FILE", "OPENAI_NAMES", "DRAIN_TIMEOUT_S"):
        monkeypatch.delenv(f"KIMI_{name}", raising=False)
    monkeypatch.setattr("kimi_openai.serve", lambda settings, **more: started.append((settings, more)))
    monkeypatch.setattr(openai_endpoint, "give_large_memory_back", lambda: started.append("memory"))
    monkeypatch.setattr(openai_endpoint, "raise_descriptor_limit", lambda say: started.append("descriptors"))
    return started


def kimi_openai(*options):
    assert CliRunner().invoke(app, ["openai", *options], catch_exceptions=False).exit_code == 0


def test_of_the_servers_settings_only_the_drain_counts(monkeypatch, given):
    monkeypatch.setenv("KIMI_DRAIN_TIMEOUT_S", "7")
    monkeypatch.setenv("KIMI_PROPOSER", "lookup+eagle3")  # with a draft that `kimi serve --draft` names, and it alone
    kimi_openai()
    assert given[-1][0].stop_within_s == 7 + 25


def test_without_options_it_is_open_and_strict(given):
    kimi_openai()
    assert given[:2] == ["memory", "descriptors"]
    settings, more = given[2]
    assert (settings.url, settings.model_names, settings.api_keys) == ("localhost:8001", ("kimi",), ())
    assert (settings.names, settings.cors_origins) == ((), ())
    assert settings.splits_thinking and settings.has_chat_page and settings.refuses_unknown_fields
    del more["say"]
    assert more == {
        "host": "127.0.0.1",
        "port": 9000,
        "metrics_port": None,
        "logs_json": False,
        "logs_access": False,
        "otlp_endpoint": "",
    }


def test_options_reach_the_endpoint(monkeypatch, given):
    monkeypatch.setenv("KIMI_OPENAI_NAMES", "a.example, ,b.example")
    monkeypatch.setenv("KIMI_API_KEY", "secret")
    names = ["--model-name=a", "--model-name=b", "--cors-origin=https://a", "--cors-origin=https://b"]
    kimi_openai(*names, "--no-split-thinking", "--no-chat-page", "--unknown-fields=warn", "--log-format=json")
    settings, more = given[-1]
    assert (settings.model_names, settings.cors_origins) == (("a", "b"), ("https://a", "https://b"))
    assert (settings.names, settings.api_keys) == (("a.example", "b.example"), (ApiKey.of("default", "secret"),))
    assert not (settings.splits_thinking or settings.has_chat_page or settings.refuses_unknown_fields)
    assert more["logs_json"] is True


def test_keys_come_from_a_file(monkeypatch, given, tmp_path):
    file = tmp_path / "keys"
    file.write_text('{"one": {"key": "first-secret-of-one"}}')
    monkeypatch.setenv("KIMI_API_KEYS_FILE", str(file))
    kimi_openai()
    assert [key.name for key in given[-1][0].api_keys] == ["one"]
    file.write_text("nonsense")
    with pytest.raises(ConfigError, match="KIMI_API_KEYS_FILE: "):
        kimi_openai()
    monkeypatch.setenv("KIMI_API_KEY", "secret")
    with pytest.raises(ConfigError, match="KIMI_API_KEY and KIMI_API_KEYS_FILE are both given"):
        kimi_openai()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--cors-origin=*", "name each origin"),
        ("--model-name=", "model name: '' given"),
        ("--log-format=xml", "--log-format: 'xml' given"),
    ],
)
def test_a_wrong_option_is_named(given, option, message):
    with pytest.raises(ConfigError, match=message):
        kimi_openai(option)
    assert given == []


def test_spans_need_their_packages(monkeypatch, given):
    monkeypatch.setattr(openai_endpoint.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--otlp-endpoint: install the extra"):
        kimi_openai("--otlp-endpoint=http://localhost:4318")
