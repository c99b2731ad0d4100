"""Chat sessions: typed events, thinking budgets, tool calls, and caches over turns.

A session renders the whole conversation for every turn and feeds what the caches do
not hold yet. Templates that drop earlier thoughts make the prompts of two turns
differ behind the first user message; the caches are then taken back to a mark in
front of the model's turn. A cache that fits neither way is made anew, so the answer
is that of a fresh session in every case.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_lm.generate import generation_stream, wired_limit

from .generation import DEFAULT_DEPTH, MTP, Depth, memory_policy, wrapped
from .grammar import Grammar, GrammarMatcher, call_grammar, load_vocabulary
from .loops import Loop, find_loop
from .memory import MemoryPolicy
from .reasoning import (
    PROTOCOLS,
    Call,
    ChatTemplate,
    Event,
    ReasoningConfig,
    ReasoningEmitter,
    RejectedToolCall,
    TemplateError,
    ThinkingBudget,
    ToolCall,
    Transition,
    Vocabulary,
    collect,
    resolve,
)
from .reasoning.tools import Types, infer_protocol
from .sampling import check_seed
from .targets import vocab_size
from .telemetry import Telemetry
from .thinking import MissingCapability, make_budget, template_kwargs

ToolChoice = Literal["auto", "required", "none"] | Mapping[str, str]

CAPABILITIES = ("reasoning", "tools")


@dataclass
class Usage:
    """What a turn took; live while it runs.

    Args:
        prompt_tokens (int): Tokens of the rendered conversation.
        cached_tokens (int): Of those, the ones that the caches held already.
        completion_tokens (int): Emitted tokens, with those that were forced or
            written for the model, and the end token.
        reasoning_tokens (int): Of those, tokens of thoughts without delimiters;
            known at the end.
        telemetry (list[Telemetry]): One a stream of the turn.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    telemetry: list[Telemetry] = field(default_factory=list)

    @property
    def accepted_drafts(self) -> int:
        """Drafts that the model accepted."""
        return sum(t.accepted for t in self.telemetry)

    @property
    def rejected_drafts(self) -> int:
        """Drafts that it did not."""
        return sum(t.rejected for t in self.telemetry)


@dataclass(frozen=True)
class Reply:
    """A finished turn.

    Args:
        text (str): The answer.
        reasoning (str): The thoughts.
        tool_calls (tuple[Call, ...]): Answer each with ``Session.add_tool_result``.
        rejected (tuple[RejectedToolCall, ...]): Calls that cannot be used; their text
            is part of ``text``.
        finish_reason (str): ``stop``, ``length``, ``tool_calls`` or ``cancelled``.
        usage (Usage): What it took.
    """

    text: str
    reasoning: str
    tool_calls: tuple[Call, ...]
    rejected: tuple[RejectedToolCall, ...]
    finish_reason: str
    usage: Usage


class Session:
    """A conversation with one model.

    ``messages`` is the conversation so far, in the form of chat templates, and may be
    changed between turns. ``reply`` is the last finished turn and ``usage`` the cost of
    the last turn, live.

    Args:
        model, tokenizer: From ``mlx_mtp.load`` or ``mlx_lm.load``.
        capabilities: What the application relies on, of ``"reasoning"`` and
            ``"tools"``; a model without it is refused here.
        system (str, optional): The system message.
        tools (list, optional): Declarations of tools, as in chat templates.
        reasoning (ReasoningConfig or str, optional): How the model thinks, or the
            name of its family. Default: found from the model and its chat template.
        mtp, num_draft_tokens, sampler, memory: As in ``stream_generate``.
        max_tokens (int): Limit of a turn; -1 is none.

    Raises:
        MissingCapability: The model cannot think, or has no tools, and should.
        ValueError: It has no chat template, or an argument is out of range.

    Example:
        >>> session = Session(*load("demo"), capabilities={"reasoning"})
        >>> session.respond("What is 57 + 68?", thinking_budget=40).text
        'The sum is 125.'
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        capabilities: Collection[str] = (),
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: ReasoningConfig | str | None = None,
        mtp: MTP = "auto",
        num_draft_tokens: Depth = DEFAULT_DEPTH,
        sampler=None,
        memory: MemoryPolicy | None = None,
        max_tokens: int = 1024,
    ):
        tokenizer = wrapped(tokenizer, model)
        self._model, self._tokenizer = model, tokenizer
        self._tools = list(tools or ())
        Types(self._tools)  # refuses bad declarations
        self._max_tokens = _check_limit(max_tokens)
        self._config = self._find_config(reasoning)
        if isinstance(capabilities, str):
            capabilities = {capabilities}
        self._check_capabilities({*capabilities, *(["tools"] if tools else [])})
        self._vocabulary = Vocabulary.from_tokenizer(tokenizer)
        memory = memory_policy(model, memory)
        self._loop: Loop = find_loop(model, mtp, num_draft_tokens, sampler, memory)
        self._system = system
        self._cancelled = threading.Event()
        self._running = False
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        self._check_idle()
        self.messages: list[dict[str, Any]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self.reply: Reply | None = None
        self.usage = Usage()
        self._planned: _Turn | None = None
        self._call_numbers = itertools.count()
        self._forget()

    def respond(self, message: str | None = None, **options) -> Reply:
        """A whole turn; the arguments are those of ``stream``."""
        for _ in self.stream(message, **options):
            pass
        return self.reply

    def stream(
        self,
        message: str | None = None,
        *,
        thinking: bool | None = None,
        effort: str | None = None,
        thinking_budget: int | None = None,
        answer_reserve: int | None = None,
        max_tokens: int | None = None,
        tool_choice: ToolChoice = "auto",
        response_format: Mapping[str, Any] | Grammar | None = None,
        seed: int | None = None,
    ) -> Iterator[Event]:
        """Starts a turn; iterate over the result for its events.

        A turn that is cancelled or whose iterator is closed is kept as far as it
        came. One that fails, or ends without a token, leaves the conversation as it
        was.

        Args:
            message (str, optional): The user's. ``None`` goes on behind tool results.
            thinking (bool, optional): Default: the model's own.
            effort (str, optional): A reasoning effort of the model.
            thinking_budget (int, optional): Most tokens of thoughts.
            answer_reserve (int, optional): Tokens of ``max_tokens`` that thoughts
                must leave for the answer. Default: 1 with a budget, else none.
            max_tokens (int, optional): Default: the session's.
            tool_choice: ``"required"`` or ``{"name": ...}`` makes the model call a
                tool once it has thought; ``"none"`` hides the tools from it.
            response_format (dict or Grammar, optional): What the answer fits; a dict
                is a JSON schema.
            seed (int, optional): Fixes a sampled turn.

        Raises:
            ReasoningError: One of its classes, for what the model cannot do.
            ValueError: An argument is out of range.
            ImportError: A grammar is needed and llguidance is missing.
        """
        self._check_idle()
        if message is not None and not isinstance(message, str):
            raise TypeError(f"message must be a str but is a {type(message).__name__}.")
        if thinking not in (True, False, None):
            raise TypeError(f"thinking must be a bool or None but is {thinking!r}.")
        check_seed(seed)
        tools, constraint = self._constrain(tool_choice, response_format)
        limit = self._max_tokens if max_tokens is None else _check_limit(max_tokens)
        messages = list(self.messages)
        if message is not None:
            messages.append({"role": "user", "content": message})
        kwargs = template_kwargs(
            self._config if self._config.start else None, thinking, effort
        )
        prompt, boundary = self._render(messages, tools, kwargs)
        turn = _Turn(messages, prompt, boundary, limit, seed, self._call_numbers)
        self._plan_thought(
            turn, thinking, constraint, thinking_budget, answer_reserve, tools
        )
        if constraint is not None:
            self._plan_constraint(turn, constraint)
        self._planned = turn
        self._cancelled.clear()
        return self._run(turn)

    def add_tool_result(self, call: Call | ToolCall, content: Any) -> None:
        """Adds the result of a call of the last turn.

        Args:
            call: From ``Reply.tool_calls`` or the event.
            content: Text, or a value that is written as JSON.

        Raises:
            ValueError: The last turn has no such call, or it has a result.
        """
        if call.id not in self._open_calls():
            raise ValueError(
                f"call {call.id!r} is not one of the open calls of the last turn: "
                f"{', '.join(self._open_calls()) or 'none'}."
            )
        self._planned = None
        if not isinstance(content, str):
            content = json.dumps(content, ensure_ascii=False)
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": content,
            }
        )

    def cancel(self) -> None:
        """Ends the turn that runs or is about to, within a block; from any thread."""
        self._cancelled.set()

    # Setup

    def _find_config(self, reasoning) -> ReasoningConfig:
        """How the model thinks and calls; without delimiters if it does not think."""
        template = ChatTemplate.from_tokenizer(self._tokenizer)
        if template is None:
            raise ValueError("A session needs a tokenizer with a chat template.")
        config = resolve(
            reasoning,
            model_type=getattr(self._model, "model_type", None),
            template=template,
        )
        if config is None:
            return ReasoningConfig("", "", tools=infer_protocol(template.source))
        return config

    def _check_capabilities(self, capabilities: Collection[str]) -> None:
        if unknown := sorted(set(capabilities) - set(CAPABILITIES)):
            raise ValueError(
                f"capabilities must be of {', '.join(CAPABILITIES)} but has "
                f"{unknown[0]!r}."
            )
        if "reasoning" in capabilities and not self._config.start:
            raise MissingCapability(
                "reasoning",
                "The chat template of this model shows no thoughts. Do without the "
                "capability, or pass reasoning=.",
            )
        if "tools" in capabilities and not self._takes_tools():
            raise MissingCapability(
                "tools",
                "The chat template of this model has no place for tools, or their "
                "calls are in an unknown format.",
            )

    def _takes_tools(self) -> bool:
        """Whether a declared tool shows in the prompt."""
        function = {"name": "f", "description": "", "parameters": {"type": "object"}}
        prompts = [
            self._render([{"role": "user", "content": "Hi"}], tools, {})
            for tools in ([], [{"type": "function", "function": function}])
        ]
        return bool(self._config.tools) and prompts[0] != prompts[1]

    def _render(self, messages, tools, kwargs) -> tuple[list[int], int]:
        """The prompt, and the length of what is in front of the model's turn."""
        _check_messages(messages)
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise ValueError("message must be given: there is nothing to answer.")
        prompts = []
        for generation in (True, False):
            try:
                ids = self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    add_generation_prompt=generation,
                    **kwargs,
                )
            except Exception as error:
                raise TemplateError(
                    f"The chat template fails on this conversation: {error}"
                ) from error
            prompts.append(list(ids))
        prompt, without = prompts
        return prompt, min(_common(prompt, without), len(prompt) - 1)

    def _constrain(
        self, tool_choice: ToolChoice, response_format
    ) -> tuple[list, Grammar | None]:
        """The tools that the model sees, and what it must write."""
        if name := _tool_name(tool_choice):
            tool_choice = "required"
        if tool_choice not in ("auto", "required", "none"):
            raise ValueError(
                "tool_choice must be 'auto', 'required', 'none' or {'name': ...} but "
                f"is {tool_choice!r}."
            )
        tools = [] if tool_choice == "none" else self._tools
        if tool_choice != "required":
            if response_format is None:
                return tools, None
            after = (self._config.transition or Transition()).after or "\n\n"
            if isinstance(response_format, Grammar):
                lead = response_format.lead or after
                return tools, replace(response_format, lead=lead)
            return tools, Grammar.json_schema(response_format, lead=after)
        if response_format is not None:
            raise ValueError("response_format and a required tool exclude each other.")
        if not tools:
            raise ValueError("tool_choice requires a tool but the session has none.")
        return tools, call_grammar(self._config.tools, tools, self._vocabulary, name)

    def _plan_thought(
        self, turn: _Turn, thinking, constraint, budget, reserve, tools
    ) -> None:
        """The emitter and the budget; opens a thought in front of a constraint."""
        config, text = self._config, self._tokenizer.decode(turn.prompt)
        primed = config.prompt_opens(text)
        turn.emitter = ReasoningEmitter(
            config, self._vocabulary, primed=primed, tools=tools
        )
        turn.thinks = primed
        if constraint is not None and not primed and _wants_thought(config, thinking):
            turn.written = self._vocabulary.encode(config.start)
            text += config.start
            turn.thinks = True
        if budget is None and reserve is None:
            return
        turn.budget = make_budget(
            config if config.start else None,
            self._tokenizer,
            text,
            budget,
            vocabulary=self._vocabulary,
            max_tokens=None if turn.limit == -1 else turn.limit - len(turn.written),
            answer_reserve=1 if reserve is None else reserve,
            vocab_size=vocab_size(self._model),
        )

    def _plan_constraint(self, turn: _Turn, constraint: Grammar) -> None:
        turn.constraint = constraint
        turn.grammar = GrammarMatcher(constraint, load_vocabulary(self._tokenizer))

    # One turn

    def _run(self, turn: _Turn) -> Iterator[Event]:
        self._check_idle()
        if self._planned is not turn:
            raise RuntimeError("The conversation has gone on since this turn was made.")
        self._running = True
        self.usage = turn.usage
        try:
            with wired_limit(self._model, [generation_stream]):
                reason = yield from self._answer(turn)
            events = self._record(turn, reason)
        except GeneratorExit:
            self._record(turn, "cancelled")
            raise
        except BaseException:
            self._forget()
            raise
        finally:
            self._running = False
        yield from events

    def _answer(self, turn: _Turn) -> Iterator[Event]:
        """Emits the events of a turn but for the last; returns its finish reason."""
        reason = None
        try:
            rest = self._feed(turn)
            if turn.thinks or turn.grammar is None:
                reason = yield from self._decode(turn, rest, turn.written, turn.budget)
                rest = []
            if reason is None:
                written = self._write_opener(turn)
                if not rest + written:  # a stream begins with a token: read some anew
                    known = self._cached
                    rest = known[self._reuse(known) :]
                reason = yield from self._decode(turn, rest, written, turn.grammar)
        except _Cancelled:
            self._forget()
            reason = "cancelled"
        return reason

    def _write_opener(self, turn: _Turn) -> list[int]:
        """What is written for the model between its thought and the grammar."""
        constraint = turn.constraint
        text = constraint.opener
        if turn.emitter.calling:
            # The model has ended its thought with the call's own delimiter.
            for opener, _ in PROTOCOLS[self._config.tools].spans:
                text = text.removeprefix(opener)
        elif turn.thinks:
            text = constraint.lead + text
        return self._vocabulary.encode(text)

    def _decode(
        self, turn: _Turn, prompt: list[int], written: list[int], controller
    ) -> Iterator[Event]:
        """Decodes behind a prompt and what is written for the model.

        Returns the finish reason, None when a thought has ended.
        """
        if 0 <= turn.left <= len(written):
            return "length"
        yield from turn.write(written)
        prompt = prompt + written
        steps = self._loop.stream(
            prompt,
            self._caches,
            max_tokens=turn.left,
            controller=controller,
            processors=[],
            stop_tokens=self._tokenizer.eos_token_ids,
            seed=turn.next_seed(),
            progress=self._check_cancelled,
        )
        if telemetry := getattr(steps, "telemetry", None):
            turn.usage.telemetry.append(telemetry)
        with closing(steps):
            for step in steps:
                self._cached += [*prompt, step.token]
                prompt, turn.started = [], True
                turn.usage.completion_tokens += 1
                if step.token in self._tokenizer.eos_token_ids:
                    return "stop"
                yield from turn.take(turn.emitter.push(step.token, forced=step.forced))
                if self._cancelled.is_set():
                    return "cancelled"
                if controller is not turn.grammar and turn.thought_ended():
                    return None
        return "length"

    def _record(self, turn: _Turn, reason: str) -> list[Event]:
        """Ends the turn: its last events, the reply and the message."""
        events = turn.take(turn.emitter.finish(reason))
        end, parts = events[-1], collect(turn.events)
        turn.usage.reasoning_tokens = end.reasoning_tokens
        self.reply = Reply(
            parts.response,
            parts.reasoning,
            parts.tool_calls,
            parts.rejected,
            end.reason,
            turn.usage,
        )
        if turn.started:
            self.messages = [*turn.messages, _message(self.reply)]
        return events

    def _check_cancelled(self, done: int = 0, total: int = 0) -> None:
        if self._cancelled.is_set():
            raise _Cancelled

    def _check_idle(self) -> None:
        if self._running:
            raise RuntimeError(
                "A turn of this session is running. Let it end, close it or cancel it."
            )

    # Caches

    def _feed(self, turn: _Turn) -> list[int]:
        """Feeds the prompt up to the model's turn, and marks that point.

        Returns the rest of the prompt, at least one token.
        """
        turn.usage.cached_tokens = kept = self._reuse(turn.prompt)
        if turn.boundary > kept:
            part = turn.prompt[kept : turn.boundary]
            self._loop.feed(part, self._caches, progress=self._check_cancelled)
            self._cached = turn.prompt[: turn.boundary]
            mark = turn.boundary, self._loop.snapshot(self._caches)
            # The mark of the user's message serves the next one: only there are
            # thoughts dropped. The newest serves tool results.
            user = turn.messages[-1]["role"] == "user"
            self._marks = [mark] if user else [*self._marks[:1], mark]
            kept = turn.boundary
        return turn.prompt[kept:]

    def _reuse(self, prompt: list[int]) -> int:
        """Makes the caches hold a true prefix of the prompt; its length."""
        common = _common(self._cached, prompt)
        if common == len(self._cached) < len(prompt):
            return common
        while self._marks:
            length, snapshot = self._marks[-1]
            surplus = len(self._cached) - length
            if length <= min(common, len(prompt) - 1):
                if self._loop.restore(self._caches, snapshot, surplus):
                    self._cached = self._cached[:length]
                    return length
            self._marks.pop()
        self._forget()
        return 0

    def _forget(self) -> None:
        self._caches = self._loop.make_cache()
        self._cached: list[int] = []  # the tokens that the caches hold
        self._marks: list[tuple[int, Any]] = []  # earlier points of the caches

    def _open_calls(self) -> list[str]:
        """Ids of the calls of the last turn that have no result."""
        _check_messages(self.messages)
        answered = set()
        for message in reversed(self.messages):
            if message["role"] != "tool":
                calls = message.get("tool_calls", ())
                return [c["id"] for c in calls if c["id"] not in answered]
            answered.add(message.get("tool_call_id"))
        return []


@dataclass
class _Turn:
    """One turn, planned before anything is decoded."""

    messages: list[dict[str, Any]]
    prompt: list[int]
    boundary: int  # where the model's turn begins in the prompt
    limit: int
    seed: int | None
    call_numbers: Iterator[int]
    emitter: ReasoningEmitter | None = None
    thinks: bool = False  # a thought is open when decoding starts
    written: list[int] = field(default_factory=list)  # what opens it
    budget: ThinkingBudget | None = None
    constraint: Grammar | None = None
    grammar: GrammarMatcher | None = None
    started: bool = False  # a token was decoded
    events: list[Event] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self):
        self.usage.prompt_tokens = len(self.prompt)

    @property
    def left(self) -> int:
        """Tokens until the limit, -1 when there is none."""
        if self.limit == -1:
            return -1
        return max(self.limit - self.usage.completion_tokens, 0)

    def thought_ended(self) -> bool:
        """Whether the constraint takes over."""
        if self.grammar is None or self.emitter.inside or not self.emitter.closed:
            return False
        if self.emitter.calling and not self.constraint.opener:
            # A call in place of the answer: it goes on as it is.
            self.grammar = None
        return self.grammar is not None

    def next_seed(self) -> int | None:
        """The seed of the next stream; streams of one turn draw independently."""
        seed = self.seed
        self.seed = None if seed is None else (seed + 1) % 2**64
        return seed

    def write(self, tokens: list[int]) -> list[Event]:
        """The events of tokens that are written for the model."""
        self.usage.completion_tokens += len(tokens)
        events = []
        for token in tokens:
            events += self.take(self.emitter.push(token, forced=True))
        return events

    def take(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, ToolCall) and not event.id:
                # Nine characters: Mistral's templates take no other length.
                event.id = f"call{next(self.call_numbers):05d}"
        self.events += events
        return events


class _Cancelled(Exception):
    """The prompt is not fed any further."""


def _check_limit(max_tokens: int) -> int:
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
        raise TypeError(
            f"max_tokens must be an int but is a {type(max_tokens).__name__}."
        )
    if max_tokens == 0 or max_tokens < -1:
        raise ValueError(
            f"max_tokens must be positive, or -1 for no limit, but is {max_tokens}."
        )
    return max_tokens


def _check_messages(messages: Sequence) -> None:
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"messages[{i}] must be a dict with a role.")


def _tool_name(tool_choice: ToolChoice) -> str | None:
    """The tool that a choice names, in its own form or that of other APIs."""
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function", tool_choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        return name if isinstance(name, str) else None
    return None


def _wants_thought(config: ReasoningConfig, thinking: bool | None) -> bool:
    """Whether a model that opens its thoughts itself should have one."""
    if not config.start or thinking is False:
        return False
    kind = config.strategy.kind
    default = kind == "always" or (kind == "flag" and config.strategy.default_on)
    return bool(thinking) or default


def _message(reply: Reply) -> dict[str, Any]:
    """A reply as a message of the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
    return message


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
