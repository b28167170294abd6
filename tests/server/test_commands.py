"""The command line against a running server: generate, chat, bench, and Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from support.server_process import MAX_MODEL_LEN
from support.waiting import PATIENCE_S

KIMI = [sys.executable, "-m", "kimi_backend.cli.main"]
TIMEOUT_S = PATIENCE_S
STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f]")
"""They move a terminal's cursor or colour its text."""


def run(*words):
    return subprocess.run([*KIMI, *words], capture_output=True, text=True, timeout=TIMEOUT_S)


def test_generate_as_json_repeats_with_its_seed(url):
    words = ("generate", "def add(a, b):", f"--url={url}", "--max-tokens=8", "--seed=3", "--json")
    first, again = (json.loads(run(*words).stdout) for _ in range(2))
    assert first["text"] == again["text"]
    assert len(first["token_ids"]) == 8


def test_generate_streams_text_and_notes_how_it_went(url):
    done = run("generate", "hi", f"--url={url}", "--max-tokens=8", "--seed=1")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "8 tokens" in done.stderr
    assert "finish: length" in done.stderr


def test_a_bad_value_is_one_message_and_exit_code_2(url):
    done = run("generate", "hi", f"--url={url}", "--top-p=7")
    assert done.returncode == 2
    assert "top_p" in done.stderr
    assert "Traceback" not in done.stderr


class Terminal:
    """`kimi chat` on a terminal of its own."""

    def __init__(self, *words, **env):
        self._master, slave = pty.openpty()
        # It answers no question for the cursor's position, and its history is not the user's.
        env = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", **env}
        self.process = subprocess.Popen([*KIMI, *words], stdin=slave, stdout=slave, stderr=slave, env=env)
        os.close(slave)
        os.set_blocking(self._master, False)
        self.seen = ""

    def wait_for(self, text, after=0):
        """Return where the text ends."""
        self._read_until(lambda: text in self.seen[after:])
        return self.seen.index(text, after) + len(text)

    def wait_for_more(self, count, after):
        """Return when so many characters of text have come, not counting what steers the terminal."""
        self._read_until(lambda: len(STEERING.sub("", self.seen[after:])) >= count)

    def _read_until(self, condition):
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break

    def type(self, text):
        os.write(self._master, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(url, tmp_path):
    options = [f"--url={url}", f"--max-tokens={MAX_MODEL_LEN - 100}", "--seed=2"]
    opened = Terminal("chat", *options, XDG_CONFIG_HOME=str(tmp_path))
    yield opened
    opened.close()


READY = "\x1b[?2004h"
"""prompt_toolkit writes this when it takes a line: pasted text comes in brackets."""
TAKEN = "\x1b[?2004l"
"""prompt_toolkit writes this when Enter has ended the line."""
CTRL_C, CTRL_D, UP, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b\r"


def test_ctrl_c_stops_an_answer_and_neither_chat_nor_server(slow_steps, terminal, url):
    end = terminal.wait_for(READY, terminal.wait_for("/reset"))
    for num_characters in (0, 0, 100):  # of the answer, before Ctrl-C
        terminal.type("tell me everything\r")
        end = terminal.wait_for(TAKEN, end)
        terminal.wait_for_more(num_characters, end)
        terminal.process.send_signal(signal.SIGINT)
        end = terminal.wait_for(READY, terminal.wait_for("stopped", end))
    terminal.type("tell me everything\r" + CTRL_C)
    terminal.wait_for(READY, terminal.wait_for("stopped", end))
    assert terminal.process.poll() is None
    terminal.type("/exit\r")
    assert terminal.process.wait(TIMEOUT_S) == 0
    assert run("generate", "hi", f"--url={url}", "--max-tokens=2").returncode == 0


def test_ctrl_c_clears_a_line_arrows_find_it_and_several_lines_are_one_question(terminal, tmp_path):
    terminal.wait_for(READY)
    terminal.type("/nothing\r")
    end = terminal.wait_for(READY, terminal.wait_for("is no command"))
    terminal.type("half")
    end = terminal.wait_for("half", end)
    terminal.type(CTRL_C)
    end = terminal.wait_for(READY, end)
    terminal.type(f"first{ALT_ENTER}second\r")
    end = terminal.wait_for(READY, terminal.wait_for("tokens/s", end))
    terminal.type(UP + "\r")  # the same question again
    end = terminal.wait_for("tokens/s", end)
    assert terminal.process.poll() is None
    terminal.type(CTRL_D)
    assert terminal.process.wait(TIMEOUT_S) == 0
    history = (tmp_path / "kimi" / "chat_history").read_text()
    assert history.count("+first\n+second\n") == 1
    assert "half" not in history


def test_keys_pressed_during_an_answer_are_the_next_lines(terminal, tmp_path):
    end = terminal.wait_for(READY)
    terminal.type("first\r")
    end = terminal.wait_for(TAKEN, end)
    terminal.wait_for_more(100, end)
    terminal.type("typed ahead\r" + CTRL_D)
    end = terminal.wait_for("tokens/s", terminal.wait_for(READY, terminal.wait_for("tokens/s", end)))
    assert terminal.process.wait(TIMEOUT_S) == 0
    assert "+first\n" in (history := (tmp_path / "kimi" / "chat_history").read_text())
    assert "+typed ahead\n" in history


def test_a_conversation_in_a_pipe(url):
    lines = "hello\n/retry\n/system be brief\n/retry\nhello\n"
    done = subprocess.run(
        [*KIMI, "chat", f"--url={url}", "--max-tokens=8", "--seed=2"], input=lines, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr.count("8 tokens, ") == 3
    assert "nothing was asked yet" in done.stderr


@pytest.mark.parametrize("generator", ["own", "perf_analyzer"])
def test_bench_compares_with_no_speculation(url, tmp_path, generator):
    if generator == "perf_analyzer":
        subprocess.run(["scripts/get_perf_analyzer.sh"], check=True, capture_output=True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(4)))
    done = run(
        "bench",
        f"--prompts={prompts}",
        f"--url={url}",
        "--max-tokens=12",
        "--seed=1",
        "--concurrency=2",
        "--compare-no-spec",
        "--repeats=2",
        f"--load-generator={generator}",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["load_generator"] == generator
    assert report["texts_equal"] is True
    assert (report["comparison"]["pairs"], report["comparison"]["verdict"]) == (2, "undecided")
    assert report["speculative"]["requests"] == 8
    assert report["plain"]["speculation"] is None
    assert report["speculative"]["speculation"]["acceptance_length"] >= 1
    assert report["step_costs"] is None, "its k is fixed"
    for name in ("first_token_ms", "inter_token_ms", "inter_chunk_ms", "request_ms"):
        assert report["speculative"][name]["p50"] > 0


def test_bench_replays_a_trace(url, tmp_path):
    line = {"input_length": 150, "output_length": 5, "hash_ids": [1, 2, 3]}
    session = [{"session_id": "a", "timestamp": 500, **line}, {"session_id": "a", "delay": 10, **line}]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, [{"timestamp": 0, **line}, *session])))
    options = ["--trace-block=64", "--first-token-limit-ms=60000", "--seed=1", f"--plot={tmp_path / 'plot.png'}"]
    done = run("bench", f"--url={url}", f"--trace={tmp_path / 'trace.jsonl'}", *options, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["sessions"], report["errors"], report["acceptance"]) == (3, 2, 0, "real")
    assert (report["prompt_tokens"], report["output_tokens"]) == (150 + 150 + 305, 15)
    assert report["cached_prompt_share"] > 0.3
    assert report["goodput"]["share"] == 1.0
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_bench_sweeps(url, tmp_path):
    options = ["--sweep-k=0,2", "--sweep-streams=1,2", "--repeats=1", "--max-tokens=6", "--num-requests=2"]
    done = run("bench", f"--url={url}", *options, "--load-generator=own", f"--plot={tmp_path / 'plot.png'}", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["streams"], row["k"]) for row in report["rows"]] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert all(row["errors"] == 0 and row["output_tokens_per_second"] > 0 for row in report["rows"])
    assert report["rows"][0]["speculation"] is None
