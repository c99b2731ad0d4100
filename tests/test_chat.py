"""The chat: piped, on a terminal, and what it refuses."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest

from mlx_mtp.cli import chat, main

COMMAND = [sys.executable, "-m", "mlx_mtp", "chat"]
SIZE = {"COLUMNS": "80", "LINES": "24"}


def test_piped_lines_are_answered_as_plain_text():
    lines = ["What is 57 + 68?", "/think", "", "/reset", "/think", "/x", "/exit", "no"]
    done = subprocess.run(
        [*COMMAND, "--system", "Answer briefly."],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer, *thought = done.stdout.splitlines()
    assert "125" in answer and "\x1b" not in done.stdout
    assert "Result: 125" in thought
    assert thought[-3:] == [
        "The conversation is empty.",
        "There is no thought to show.",
        f"There is no command /x. {chat.HELP}",
    ]


def test_piped_lines_of_any_kind_do_not_end_the_chat():
    lines = [b"caf\xe9", b"/usr/bin is a folder", b"Hello!", b"/exit "]
    done = subprocess.run(
        [*COMMAND, "--max-tokens", "3"],
        input=b"\n".join(lines),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == ["The input must be UTF-8.", "", ""]
    assert done.stderr.decode().count("the answer was cut at the limit") == 2


class Screen:
    """A chat on a terminal of its own."""

    def __init__(self, **env):
        self.fd, inner = pty.openpty()
        self.process = subprocess.Popen(
            COMMAND,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, **SIZE, "TERM": "xterm", **env},
            # A program that a shell runs in the background ignores Ctrl-C.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        os.close(inner)
        self.text = ""

    def wait(self, pattern, seconds=60):
        """Reads until the pattern comes; what came up to there."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            left = end - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.text!r}"
            if select.select([self.fd], [], [], left)[0]:
                self.text += os.read(self.fd, 65536).decode(errors="replace")
        self.text, text = self.text[found.end() :], self.text[: found.end()]
        return text

    def interrupt(self, pattern):
        """Sends Ctrl-C until it is heard: input() is deaf before it waits."""
        for _ in range(20):
            self.process.send_signal(signal.SIGINT)
            try:
                return self.wait(pattern, 2)
            except AssertionError:
                continue
        return self.wait(pattern, 2)

    def say(self, line):
        os.write(self.fd, line.encode() + b"\r")


@contextmanager
def screen_of(**env):
    screen = Screen(**env)
    try:
        screen.wait("> ")
        yield screen
        screen.say("/exit")
        assert screen.process.wait(20) == 0
    finally:
        screen.process.kill()
        screen.process.wait()
        os.close(screen.fd)


def test_a_terminal_shows_the_thought_and_folds_it():
    with screen_of() as screen:
        screen.say("What is 57 + 68?")
        live = screen.wait("▸ thought of [0-9]+ tokens, /think shows it")
        assert "column by column" in live and "tokens/s" in live
        rest = screen.wait("of drafts accepted.*> ")
        assert "The sum is 125." in rest
        screen.say("/think")
        assert "Result: 125" in screen.wait("> ")
        screen.say("What is 57 * 68?")  # a thought long enough for any machine
        screen.wait("Split")
        screen.process.send_signal(signal.SIGINT)
        assert "3876" not in screen.wait("stopped.*> ")


def test_ctrl_c_without_a_turn_and_a_narrow_terminal():
    with screen_of(COLUMNS="40", LINES="8") as screen:
        for _ in range(2):
            os.write(screen.fd, b"half a line")
            screen.wait("half a line")
            assert "starts anew" in screen.interrupt("answer.*> ")
        screen.say("What is 57 + 68?")
        live = screen.wait("accepted.*> ")
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", live).splitlines()
        assert max(map(len, lines)) <= 40


def test_a_terminal_that_cannot_go_back_gets_a_stream():
    with screen_of(TERM="dumb", NO_COLOR="1") as screen:
        screen.say("What is 57 + 68?")
        shown = screen.wait("of drafts accepted.*> ")
        assert "\x1b" not in shown and "column by column" not in shown
        assert re.search("thought, /think shows it\r\nThe sum is 125.\r\n", shown)


def test_bad_options_are_one_line_and_code_2(capsys):
    assert main(["chat", "--thinking-budget", "2000"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "max_tokens must be at least" in error


def test_without_rich_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"pip install 'mlx-mtp\[chat\]'"):
        chat.Terminal()
