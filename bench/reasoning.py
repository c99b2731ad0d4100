"""What the router and the budget cost on the host, in microseconds a token.

    python bench/reasoning.py [--quick] [--json FILE]

A thought and an answer with code and lists, as tokens of the demo model. Each number is
the median CPU time of several passes over the stream, the arms taking turns. A pass
includes the loop over the tokens; there is no detokenizer.
"""

from __future__ import annotations

from time import process_time

import common


def vocabulary():
    from transformers import PreTrainedTokenizerFast

    import mlx_mtp
    from mlx_mtp.reasoning import Vocabulary

    folder = common.Path(mlx_mtp.__file__).parent / "demo"
    return Vocabulary.from_tokenizer(PreTrainedTokenizerFast.from_pretrained(folder))


def streams(words, size: int) -> dict[str, list[int]]:
    thought = "First, 57 + 68. The ones: 7 + 8 = 15, write 5, carry 1.\nThe tens: 12. "
    answer = "The answer is 125, as a list:\n- `57`\n- 68 and so on, more words.\n"
    return {
        "thought": words.encode(thought * size),
        "answer": words.encode("\n</think>\n\n" + answer * size),
    }


def arms(words, tokens: list[int]) -> dict:
    import mlx_mtp.reasoning as r

    config = r.family("qwen3_5")

    def emitter():
        push = r.ReasoningEmitter(config, words, primed=True).push
        for token in tokens:
            push(token)

    def limit(**options):
        return r.ThinkingBudget(
            config,
            words,
            len(tokens),
            primed=True,
            transition=r.Transition("\n", "\n\n"),
            **options,
        )

    def budget(**options):
        accept = limit(**options).accept
        for token in tokens:
            accept(token)

    def lookahead():
        budget = limit()
        for token in tokens:
            budget.restore(budget.checkpoint())
            budget.accept(token)

    return {
        "emitter": emitter,
        "budget": budget,
        "budget, loop guard": lambda: budget(loops=r.LoopGuard()),
        "budget, checkpoint and restore a token": lookahead,
    }


def alternate(runs: dict, passes: int) -> dict[str, list[float]]:
    """CPU seconds of every pass: what else runs on the machine does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(passes):
        for name, run in runs.items():
            begin = process_time()
            run()
            seconds[name].append(process_time() - begin)
    return seconds


def main() -> None:
    args = common.parser(__doc__).parse_args()
    header = common.start(args)
    common.show_header(header)
    words = vocabulary()
    rows = []
    for stream, tokens in streams(words, 30 if args.quick else 300).items():
        times = alternate(arms(words, tokens), 15)
        for name, seconds in times.items():
            us = common.median(seconds) / len(tokens) * 1e6
            rows.append(
                {
                    "name": name,
                    "stream": stream,
                    "tokens": len(tokens),
                    "us_per_token": us,
                    "spread": common.spread(seconds),
                }
            )
            print(f"{stream:8} {name:40} {us:5.2f} us a token")
    common.write(args.json, header, rows)


if __name__ == "__main__":
    main()
