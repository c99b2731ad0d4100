"""Thinking on the demo model: accuracy by budget, required calls, equality.

    python bench/thinking.py [--quick] [--json FILE]

accuracy   arithmetic with random numbers, thinking on, off, and cut after 8 to 128
           tokens. Every stream is decoded plainly and with MTP, greedy: the tokens must
           be equal, the budget kept, and no answer cut off.
reserve    24 tokens of 64 kept for the answer while decoding: none may be cut off.
forced     forwards of the target for a forced transition: one, whatever its length.
calls      a required tool call for questions that need one and for others: the call
           must be valid wherever the thought ends.

Equality needs a BLAS that rounds a row the same in any block, so the wheel's is used.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator

import common
import prompts

BUDGETS = (8, 16, 24, 32, 48, 64, 96, 128)
UTF8 = 3  # tokens that may complete a character behind the budget


def main():
    p = common.parser(__doc__)
    p.add_argument("--depth", type=int, default=3, help="drafts a round")
    p.set_defaults(blas="wheel")
    args = p.parse_args()
    header = common.start(args)
    common.show_header(header)
    bench = Bench(args.depth)
    count = 8 if args.quick else 60
    rows = [
        *bench.accuracy(arithmetic(count)),
        bench.reserve(arithmetic(count)),
        bench.forced(),
        bench.calls(10 if args.quick else 200),
    ]
    common.write(args.json, header, rows)
    failed = [row["name"] for row in rows if not row["ok"]]
    print("all as it must be" if not failed else f"failed: {', '.join(failed)}")
    sys.exit(bool(failed))


def arithmetic(count: int, seed: int = 7) -> list[tuple[str, int]]:
    """Questions and answers: sums, differences and products in turn."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        a, b = sorted((rng.randint(100, 9999), rng.randint(100, 9999)), reverse=True)
        digit = rng.randint(2, 9)
        out.append(
            [
                (f"What is {a} + {b}?", a + b),
                (f"What is {a} - {b}?", a - b),
                (f"What is {a} * {digit}?", a * digit),
            ][i % 3]
        )
    return out


class Bench:
    def __init__(self, depth: int):
        import mlx_mtp
        from mlx_mtp.thinking import reasoning_config

        self.mtp, self.depth = mlx_mtp, depth
        self.model, self.tokenizer = mlx_mtp.load("demo")
        self.config = reasoning_config(self.model, self.tokenizer)
        (self.close,) = self.tokenizer.encode("</think>", add_special_tokens=False)

    def accuracy(self, problems) -> Iterator[dict]:
        yield self._arm("thinking on", problems, {}, None)
        yield self._arm("thinking off", problems, {"enable_thinking": False}, None)
        for budget in BUDGETS:
            yield self._arm(f"budget {budget}", problems, {}, budget)

    def _arm(self, name, problems, template, budget) -> dict:
        """One way to think, on all problems, in both loops."""
        right = equal = cut = over = 0
        spent = []
        for question, expected in problems:
            prompt = self._prompt(question, **template)
            streams = [
                self._stream(prompt, mtp=mtp, thinking_budget=budget)
                for mtp in (None, self.depth)
            ]
            tokens, reason = streams[1]
            equal += streams[0] == streams[1]
            thought, answer = self._parts(tokens, template)
            right += _last_number(answer) == expected
            cut += reason != "stop"
            over += budget is not None and len(thought) > budget + UTF8
            spent.append(len(thought))
        total = len(problems)
        row = {
            "name": name,
            "problems": total,
            "right": right,
            "equal": equal,
            "cut_answers": cut,
            "over_budget": over,
            "thought_tokens": common.median(spent),
            "ok": equal == total and not cut and not over,
        }
        print(
            f"{name:14} {right / total:6.1%} right  {row['thought_tokens']:5.0f} "
            f"tokens of thought  plain = MTP {equal}/{total}  cut {cut}  over {over}"
        )
        return row

    def reserve(self, problems) -> dict:
        session = self.mtp.Session(self.model, self.tokenizer, mtp=self.depth)
        cut = 0
        for question, _ in problems:
            session.reset()
            reply = session.respond(question, max_tokens=64, answer_reserve=24)
            cut += reply.finish_reason != "stop"
        print(f"reserve        {cut} of {len(problems)} answers cut off")
        return {"name": "reserve", "answers": len(problems), "cut": cut, "ok": not cut}

    def forced(self) -> dict:
        """Depth 3 and a budget behind two whole rounds."""
        from mlx_mtp.reasoning import Transition, Vocabulary
        from mlx_mtp.thinking import make_budget

        text = "\nTime is up, so I stop here and answer with all that I have found.\n"
        vocabulary = Vocabulary.from_tokenizer(self.tokenizer)
        prompt = self._prompt("What is 3757 + 4868?")
        calls, sizes = [], []
        for transition in (Transition(), Transition(text, "\n\n")):
            budget = make_budget(
                self.config, self.tokenizer, prompt, 9, transition=transition
            )
            size = len(vocabulary.encode(f"{transition.before}</think>"))
            size += len(vocabulary.encode(transition.after))
            responses = list(
                self.mtp.stream_generate(
                    self.model,
                    self.tokenizer,
                    prompt,
                    9 + size + 1,
                    mtp=self.depth,
                    thinking_budget=budget,
                )
            )
            calls.append(responses[-1].mtp.target_calls - responses[-1].mtp.rounds)
            sizes.append(size)
        print(
            f"forced         {sizes[0]} token: {calls[0]} forwards beside the rounds, "
            f"{sizes[1]} tokens: {calls[1]}"
        )
        ok = calls[0] == calls[1] == 1
        return {"name": "forced", "tokens": sizes, "forwards": calls, "ok": ok}

    def calls(self, count: int) -> dict:
        """Half of the questions are for the calculator, half are not."""
        tool = prompts.CALCULATOR
        session = self.mtp.Session(
            self.model, self.tokenizer, tools=[tool], mtp=self.depth, max_tokens=512
        )
        rng = random.Random(3)
        needed = [
            f"What is {rng.randint(10, 999)} {rng.choice('+-*')} {rng.randint(10, 99)}?"
            for _ in range(count // 2)
        ]
        others = prompts.problems(count - len(needed), seed=3)
        from mlx_mtp.reasoning import ReasoningEnd

        ended = called = valid = asked = matched = 0
        for question in needed + others:
            session.reset()
            ends = [
                event.cause
                for event in session.stream(question, tool_choice="required")
                if isinstance(event, ReasoningEnd)
            ]
            reply = session.reply
            ended += not {"eos", "limit"} & set(ends)
            called += bool(reply.tool_calls or reply.rejected)
            valid += bool(reply.tool_calls) and not reply.rejected and not reply.text
            if expression := _expression(question):
                asked += 1
                matched += expression in [
                    call.arguments["expression"].replace(" ", "")
                    for call in reply.tool_calls
                ]
        print(
            f"calls          {count} questions, {ended} thoughts ended, {called} "
            f"called, {valid} valid; {matched} of {asked} with the asked expression"
        )
        return {
            "name": "calls",
            "questions": count,
            "thoughts_ended": ended,
            "called": called,
            "valid": valid,
            "asked_expression": [matched, asked],
            "ok": ended == called == valid,
        }

    def _prompt(self, question: str, **template) -> list[int]:
        message = {"role": "user", "content": question}
        return self.tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, **template
        )

    def _stream(self, prompt, **options) -> tuple[list[int], str]:
        responses = list(
            self.mtp.stream_generate(self.model, self.tokenizer, prompt, 400, **options)
        )
        return [r.token for r in responses], responses[-1].finish_reason

    def _parts(self, tokens, template) -> tuple[list[int], str]:
        """The tokens of the thought and the text of the answer."""
        at = tokens.index(self.close) if self.close in tokens else -1
        if template:
            return [], self.tokenizer.decode(tokens)
        if at < 0:
            return tokens, ""
        return tokens[:at], self.tokenizer.decode(tokens[at + 1 :])


def _last_number(text: str) -> int | None:
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None


def _expression(question: str) -> str | None:
    found = re.fullmatch(r"What is (\d+ [-+*] \d+)\?", question)
    return found and found[1].replace(" ", "")


if __name__ == "__main__":
    main()
