"""Chat in the terminal, with the thought folded away."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..loading import load
from ..reasoning import End, Event, ReasoningDelta, ReasoningEnd, ResponseDelta
from ..session import Session, Usage
from . import options

HELP = (
    "/think shows the last thought, /reset starts anew, /exit ends. Ctrl-C stops an "
    "answer."
)
ENDINGS = {"length": "cut at the limit", "cancelled": "stopped"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="A system message.")
    options.add_decoding(parser, max_tokens=1024)


def run(args: argparse.Namespace) -> int:
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Terminal() if on_terminal else Piped()
    options.check(args)
    sampler = options.sampler(args)
    model, tokenizer = load(args.model)
    mtp = options.mtp(args, model, tokenizer)
    session = Session(
        model,
        tokenizer,
        system=args.system,
        mtp=mtp,
        num_draft_tokens=args.depth,
        sampler=sampler,
        max_tokens=args.max_tokens,
    )
    asked = {
        "thinking": options.THINKING[args.thinking],
        "thinking_budget": args.thinking_budget,
        "seed": args.seed,
    }
    session.stream("", **asked)  # refuses bad options now; nothing is decoded
    for line in screen.lines():
        if line.strip() == "/exit":
            break
        try:
            options.check_text(line)
        except ValueError as error:
            screen.note(str(error))
            continue
        if re.fullmatch(r"/\w*", line.strip()):
            _command(line.strip(), session, screen)
        elif line.strip():
            with _interrupt_cancels(session):
                screen.turn(session, session.stream(line, **asked))
    return 0


@contextmanager
def _interrupt_cancels(session: Session) -> Iterator[None]:
    """Ctrl-C ends the turn instead of the program."""
    before = signal.signal(signal.SIGINT, lambda *_: session.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _command(line: str, session: Session, screen) -> None:
    if line == "/reset":
        session.reset()
        screen.note("The conversation is empty.")
    elif line == "/think":
        reply = session.reply
        screen.note((reply and reply.reasoning) or "There is no thought to show.")
    else:
        screen.note(f"There is no command {line}. {HELP}")


class Piped:
    """One line in, one answer out, as plain text."""

    def lines(self) -> Iterator[str]:
        # Bytes that are no UTF-8 come as surrogates, not as an error in the loop.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        for line in sys.stdin:
            yield line.rstrip("\n")

    def note(self, text: str) -> None:
        print(text, flush=True)

    def turn(self, session: Session, events: Iterator[Event]) -> None:
        for event in events:
            if isinstance(event, ResponseDelta):
                print(event.text, end="", flush=True)
        print(flush=True)
        if ending := ENDINGS.get(session.reply.finish_reason):
            print(f"mlx-mtp: the answer was {ending}", file=sys.stderr, flush=True)


class Terminal:
    """A live view of the turn; the answer stays, the thought is folded to one line."""

    def __init__(self):
        try:
            from rich.console import Console
        except ImportError:
            raise ImportError(
                "The chat needs rich: pip install 'mlx-mtp[chat]'"
            ) from None
        with suppress(ImportError):
            import readline  # noqa: F401, gives input() its line editing
        self.console = Console(highlight=False)

    def lines(self) -> Iterator[str]:
        self.note(HELP)
        while True:
            try:
                yield self.console.input("[bold]> [/bold]")
            except EOFError:
                return
            except KeyboardInterrupt:
                self.console.print()
                self.note(HELP)

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)

    def turn(self, session: Session, events: Iterator[Event]) -> None:
        clock = Clock()
        show = self._stream if self.console.is_dumb_terminal else self._live
        show(session, events, clock)
        status = [clock.status(session.usage)]
        status += filter(None, [ENDINGS.get(session.reply.finish_reason)])
        self.note(", ".join(status))

    def _stream(self, session: Session, events: Iterator[Event], clock: Clock) -> None:
        """For terminals that cannot take a line back."""
        for event in events:
            clock.tick(session.usage)
            if isinstance(event, ReasoningEnd):
                self.note("▸ thought, /think shows it")
            elif isinstance(event, ResponseDelta):
                print(event.text, end="", flush=True)
        clock.stop()
        print()

    def _live(self, session: Session, events: Iterator[Event], clock: Clock) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        thought = answer = ""
        view = self._view("", "", "reading the prompt")
        with Live(view, console=self.console, transient=True) as live:
            for event in events:
                clock.tick(session.usage)
                if isinstance(event, ReasoningDelta):
                    thought += event.text
                elif isinstance(event, ResponseDelta):
                    answer += event.text
                elif isinstance(event, End):
                    clock.stop()
                live.update(self._view(thought, answer, clock.status(session.usage)))
        reply, usage = session.reply, session.usage
        if reply.reasoning:
            self.note(f"▸ thought of {usage.reasoning_tokens} tokens, /think shows it")
        if reply.text:
            self.console.print(Markdown(reply.text))

    def _view(self, thought: str, answer: str, status: str):
        """The newest lines that fit, with the status below."""
        from rich.console import Group
        from rich.text import Text

        text = Text(thought, style="dim")
        if answer:
            text.append("\n\n" if thought else "").append(answer, style="not dim")
        lines = text.wrap(self.console, self.console.width)
        lines = lines[-max(self.console.height - 3, 1) :]
        status = Text(status, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(*lines, status)


class Clock:
    """Speed of a turn, from its first event on."""

    def __init__(self):
        self.start = self.end = None
        self.before = 0  # tokens that had come by then

    def tick(self, usage: Usage) -> None:
        if self.start is None:
            self.start, self.before = time.perf_counter(), usage.completion_tokens

    def stop(self) -> None:
        self.end = time.perf_counter()

    def status(self, usage: Usage) -> str:
        """Speed, tokens and acceptance in one line."""
        seconds = (self.end or time.perf_counter()) - (self.start or 0)
        made = usage.completion_tokens - self.before
        parts = [f"{usage.completion_tokens} tokens"]
        if self.start is not None and seconds > 0 and made:
            parts.insert(0, f"{made / seconds:.1f} tokens/s")
        drafted = usage.accepted_drafts + usage.rejected_drafts
        if drafted:
            parts.append(f"{usage.accepted_drafts / drafted:.0%} of drafts accepted")
        return ", ".join(parts)
