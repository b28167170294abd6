"""The APIs that Triton Server is told to close, and what may be the secret."""

import pytest

from kimi_backend.errors import ConfigError
from kimi_backend.hosting.admin_access import SECRET_VARIABLE, choose_secret, restricting_options

WRITING = {"shared-memory", "model-repository", "trace", "logging"}
READING = {"model-config", "statistics"}


@pytest.mark.parametrize(
    ("host", "closed"),
    [
        ("127.0.0.1", WRITING),
        ("127.1.2.3", WRITING),
        ("::1", WRITING),
        ("0.0.0.0", WRITING | READING),
        ("192.168.1.5", WRITING | READING),
        ("localhost", WRITING | READING),
    ],
)
def test_what_only_reads_is_open_where_this_machine_alone_can_ask(host: str, closed: set[str]) -> None:
    options = restricting_options("s3cret", host)
    assert [option.split("=", 1)[0] for option in options] == ["--http-restricted-api", "--grpc-restricted-protocol"]
    for option in options:
        groups, rule = option.split("=", 1)[1].split(":")
        assert set(groups.split(",")) == closed
        assert rule == "kimi-admin=s3cret"


def test_a_secret_is_the_operators_or_a_new_one() -> None:
    assert choose_secret({SECRET_VARIABLE: "open-sesame"}) == "open-sesame"
    random = {choose_secret({}) for _ in range(4)}
    assert len(random) == 4
    assert min(map(len, random)) == 32


@pytest.mark.parametrize("secret", ["a b", "a:b", "a=b", "a,b", "ä", "a\nb", " "])
def test_a_secret_that_would_change_the_rule_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"KIMI_ADMIN_SECRET: letters, digits") as refusal:
        choose_secret({SECRET_VARIABLE: secret})
    assert secret.strip() == "" or secret not in str(refusal.value)
