"""`kimi openai` beside the server: which of the server's variables it reads."""

import pytest

pytest.importorskip("kimi_openai")

from kimi_backend.cli import openai_endpoint


def test_of_the_servers_settings_only_the_drain_counts(monkeypatch):
    monkeypatch.setenv("KIMI_DRAIN_TIMEOUT_S", "7")
    monkeypatch.setenv("KIMI_PROPOSER", "lookup+eagle3")  # with a draft that `kimi serve --draft` names, and it alone
    given = []
    monkeypatch.setattr("kimi_openai.serve", lambda settings, **_: given.append(settings))
    monkeypatch.setattr(openai_endpoint, "give_large_memory_back", lambda: None)
    monkeypatch.setattr(openai_endpoint, "raise_descriptor_limit", lambda say: None)
    openai_endpoint.openai_command()
    assert given[0].stop_within_s == 7 + 25
