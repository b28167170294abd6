"""The chat page: what its answer carries, and what a browser shows of it, before a server that says what it is told."""

import asyncio
import re

import pytest

from kimi_client import Chunk, InvalidRequest
from kimi_client.aio import AsyncStream
from kimi_openai import EndpointSettings
from kimi_openai.api_keys import ApiKey
from support.browser import CHROMIUM, open_page
from support.openai_endpoint import running_endpoint
from support.waiting import wait_for

STATISTICS = {
    "num_prompt_tokens": 3,
    "num_output_tokens": 8,
    "num_cached_tokens": 0,
    "seed": 7,
    "speculative_decoding": {"mean_acceptance_length": 2.5, "acceptance_per_position": [0.75, 0.5, 0.25]},
}
HOSTILE = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>&amp; <b>'
LONG_LINE = "x" * 100_000
REPLIES = {
    "hello": [("Hel", 1), ("lo wor", 3), ("ld", 2), (".", 1)],
    "hostile": [(HOSTILE, 1), (HOSTILE, 4), (HOSTILE, 1)],
    "long": [(LONG_LINE, 4)],
    "think": [("I think", 1), ("</think>Done", 2)],
}

with_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


class ScriptedStream(AsyncStream):
    """Says what the last message asks for; `slow` goes on until it is cancelled."""

    def __init__(self, message):
        super().__init__("r1", lambda again: None)
        self._message = message
        self.is_cancelled = False

    async def __aiter__(self):
        if self._message == "bad":
            raise InvalidRequest("max_tokens: 0 given, 1 or more is needed")
        if self._message == "slow":
            while not self.is_cancelled:
                await asyncio.sleep(0.02)
                yield Chunk("tick ", 2, token_ids=(1, 2), token_origins=(1, 0), token_offsets=(0, 1))
            return
        pieces = REPLIES[self._message]
        for index, (text, num_tokens) in enumerate(pieces, 1):
            end = {"finish_reason": "stop", "statistics": STATISTICS} if index == len(pieces) else {}
            if text.startswith("</think>"):
                end["control_offsets"] = (len(pieces[0][0]),)
            start = sum(len(before) for before, _ in pieces[: index - 1])
            yield Chunk(
                text,
                num_tokens,
                token_ids=tuple(range(num_tokens)),
                # A letter a token, all but the last of them guessed; that has the rest. "w" was looked up.
                token_origins=(2 if "w" in text else 1,) * (num_tokens - 1) + (0,),
                token_offsets=tuple(range(start, start + num_tokens)),
                begins_thinking=index == 1 and self._message == "think",
                **end,
            )

    def cancel(self):
        self.is_cancelled = True
        self._is_open = False


class ScriptedClient:
    """A stand-in for the gRPC client."""

    streams: list[ScriptedStream]
    asked: list[dict]

    def __init__(self, url):
        type(self).streams, type(self).asked = [], []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def stream(self, *, stream, **fields):
        self.asked.append(fields)
        self.streams.append(ScriptedStream(fields["messages"][-1]["content"]))
        return self.streams[-1]


@pytest.fixture(scope="module")
def endpoint():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kimi_openai.app.AsyncKimiClient", ScriptedClient)
        with running_endpoint(EndpointSettings()) as running:
            yield running


@pytest.fixture(scope="module")
def browser():
    with open_page() as page:
        yield page


@pytest.fixture
def page(browser, endpoint):
    """The page as it comes, whose console stays clean and which asks nobody else for anything."""
    browser.requests.clear()
    browser.problems.clear()
    ScriptedClient.asked.clear()
    ScriptedClient.streams.clear()
    browser.open(f"http://127.0.0.1:{endpoint.port}/")
    browser.wait_for("$('where').textContent")
    yield browser
    root = f"http://127.0.0.1:{endpoint.port}/"
    assert {url for url in browser.requests if not url.startswith((root, "data:"))} == set()
    assert browser.problems == []


def ask(page, text, *, waits=True):
    """The text of the reply, once it has ended."""
    replies = page.evaluate("document.querySelectorAll('.foot').length")
    page.evaluate("prompt.focus()")
    page.type(text)
    page.press("Enter")
    if waits:
        page.wait_for(f"document.querySelectorAll('.foot').length === {replies + 1}")
    return page.evaluate("[...document.querySelectorAll('.reply > .text')].pop().textContent")


def test_it_is_one_answer_that_may_load_nothing(endpoint):
    status, headers, body = endpoint.send("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert set(re.findall(r"https?://[^\"')\s]+", body.decode())) == {"http://www.w3.org/2000/svg"}
    assert b".innerHTML" not in body


def test_a_key_is_not_needed_for_the_page_itself():
    with running_endpoint(EndpointSettings(api_keys=(ApiKey.of("one", "secret"),))) as endpoint:
        assert endpoint.send("GET", "/")[0] == 200
        assert endpoint.send("GET", "/v1/models")[0] == 401


def test_it_can_be_switched_off():
    with running_endpoint(EndpointSettings(has_chat_page=False)) as endpoint:
        assert endpoint.send("GET", "/")[0] == 404


@with_browser
def test_a_reply_streams_and_its_rounds_are_counted(page):
    assert ask(page, "hello") == "Hello world."
    (asked,) = ScriptedClient.asked
    assert asked["messages"] == [{"role": "user", "content": "hello"}]
    assert asked["temperature"] == 0.6
    assert asked["chat_template_kwargs"] == {"thinking": False}
    assert "num_speculative_tokens" not in asked
    assert page.evaluate("$('per-round').textContent") == "2.50"
    assert page.evaluate("[...document.querySelectorAll('#positions span:nth-child(3n)')].map(e => e.textContent)") == [
        "75 %",
        "50 %",
        "25 %",
    ]
    assert page.evaluate("[...document.querySelectorAll('.reply .draft')].map(e => e.textContent)") == ["l"]
    assert page.evaluate("[...document.querySelectorAll('.reply .lookup')].map(e => e.textContent)") == ["lo"]
    # The first chunk is the prompt's and belongs to no round.
    bars = "[...document.querySelectorAll('#chart rect[width=\"3.8\"]')].map(e => e.style.fill.slice(6, -1))"
    assert page.evaluate(bars) == ["lookup", "target", "draft", "target", "target"]
    assert "seed 7" in page.evaluate("document.querySelector('.foot').textContent")


@with_browser
def test_settings_reach_the_server_and_the_conversation_goes_on(page):
    ask(page, "hello")
    page.evaluate("$('temperature').value = 0; $('k').value = 5; $('seed').value = 3; $('max').value = 9")
    page.evaluate("$('thinking').checked = true")
    ask(page, "hello")
    asked = ScriptedClient.asked[-1]
    assert [m["role"] for m in asked["messages"]] == ["user", "assistant", "user"]
    assert asked["messages"][1]["content"] == "Hello world."
    assert {name: asked[name] for name in ("temperature", "num_speculative_tokens", "seed", "max_tokens")} == {
        "temperature": 0,
        "num_speculative_tokens": 5,
        "seed": 3,
        "max_tokens": 9,
    }
    assert "chat_template_kwargs" not in asked, "the model thinks if its template says so"


@with_browser
def test_text_of_the_model_is_text(page):
    assert ask(page, "hostile") == HOSTILE * 3
    assert page.evaluate("document.querySelectorAll('#log img, #log script, #log b').length") == 0
    assert page.evaluate("document.title") == "kimi"


@with_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_line_of_100_kb_stays_on_the_page(page, width):
    page.open(page.evaluate("location.href"), width=width)
    assert ask(page, "long") == LONG_LINE
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth && log.scrollWidth <= log.clientWidth")


@with_browser
def test_thoughts_stand_apart(page):
    with running_endpoint(EndpointSettings(splits_thinking=True)) as endpoint:
        page.open(f"http://127.0.0.1:{endpoint.port}/")
        assert ask(page, "think") == "Done"
        assert page.evaluate("document.querySelector('.thoughts .text').textContent") == "I think"
        page.requests.clear()


@with_browser
@pytest.mark.parametrize("how", ["Escape", "button", "new chat"])
def test_a_running_reply_can_be_stopped(page, how):
    ask(page, "slow", waits=False)
    page.wait_for("document.querySelector('.reply .text').textContent.length > 20")
    if how == "Escape":
        page.press("Escape")
    elif how == "button":
        page.evaluate("$('send').click()")
    else:
        page.press("n", code="KeyN", alt=True)
    wait_for(lambda: ScriptedClient.streams[0].is_cancelled, "the server's request goes on")
    page.wait_for("$('send').textContent === 'Send'")
    if how == "new chat":
        assert ask(page, "hello") == "Hello world."
        assert ScriptedClient.asked[-1]["messages"] == [{"role": "user", "content": "hello"}]
    else:
        assert "Stopped after" in page.evaluate("document.querySelector('.foot').textContent")


@with_browser
def test_a_refusal_is_shown_in_the_servers_words(browser, endpoint):
    # The browser itself notes a status of 400 on its console, so this is no test of a clean one.
    browser.open(f"http://127.0.0.1:{endpoint.port}/")
    browser.wait_for("$('where').textContent")
    ask(browser, "bad")
    assert "max_tokens: 0 given" in browser.evaluate("document.querySelector('.foot.error').textContent")
    assert ask(browser, "hello") == "Hello world."
    assert len(ScriptedClient.asked[-1]["messages"]) == 1, "what was refused is no part of the conversation"


@with_browser
def test_keys_write_and_break_lines(page):
    page.evaluate("document.activeElement.blur()")
    page.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.type("a")
    page.press("Enter", shift=True)
    page.type("b")
    assert page.evaluate("prompt.value") == "a\nb"
    assert ScriptedClient.asked == []


@with_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_phones_and_both_schemes(page, width, scheme):
    page.open(page.evaluate("location.href"), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    outside = "[...document.querySelectorAll('header button, #send, #prompt')].filter(e => e.offsetWidth &&"
    assert page.evaluate(f"{outside} e.getBoundingClientRect().right > innerWidth).length") == 0
    page.evaluate("$('theme').click()")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
