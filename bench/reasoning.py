"""What the router and the budget cost on the host, a token.

    python bench/reasoning.py [--quick] [--json FILE]

Streams of the demo tokenizer: a thought, then an answer with code and lists. Each
number is the median of several passes, arms alternating; it includes the loop over the
tokens and no detokenizer (there is none).
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

from tokenizers import Tokenizer

import mlx_mtp.reasoning as r

DEMO = Path(r.__file__).parents[1] / "demo" / "tokenizer.json"
THOUGHT = "First, 57 + 68. The ones: 7 + 8 = 15, write 5, carry 1.\nThe tens: 12. "
ANSWER = "The answer is 125, as a list:\n- `57`\n- 68 and so on, more words follow.\n"


def demo_vocabulary() -> r.Vocabulary:
    tokenizer = Tokenizer.from_file(str(DEMO))
    added = tokenizer.get_added_tokens_decoder()
    from mlx_mtp.reasoning.vocabulary import _byte_level

    def piece(id: int) -> bytes:
        if id in added:
            return added[id].content.encode()
        return _byte_level(tokenizer.id_to_token(id))

    return r.Vocabulary(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        piece,
        {token.content: id for id, token in added.items()},
        special=[id for id, token in added.items() if token.special],
        size=tokenizer.get_vocab_size(),
    )


def passes(vocabulary: r.Vocabulary, tokens: list[int]) -> dict:
    config = r.family("qwen3_5")

    def emit():
        push = r.ReasoningEmitter(config, vocabulary, primed=True).push
        for token in tokens:
            push(token)

    def budget(**kwargs):
        accept = r.ThinkingBudget(
            config,
            vocabulary,
            len(tokens),
            primed=True,
            transition=r.Transition("\n", "\n\n"),
            **kwargs,
        ).accept

        def run():
            for token in tokens:
                accept(token)

        return run

    def lookahead():
        limit = r.ThinkingBudget(
            config, vocabulary, len(tokens), primed=True, transition=r.Transition()
        )
        for token in tokens:
            limit.restore(limit.checkpoint())
            limit.accept(token)

    return {
        "emitter": lambda: emit(),
        "budget": lambda: budget()(),
        "budget with loop guard": lambda: budget(loops=r.LoopGuard())(),
        "budget with a checkpoint a token": lookahead,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    vocabulary = demo_vocabulary()
    size = 50 if args.quick else 400
    thought = vocabulary.encode(THOUGHT * size)
    answer = vocabulary.encode("\n</think>\n\n" + ANSWER * size)
    streams = {"thought": thought, "answer": answer}
    rows = []
    for stream, tokens in streams.items():
        arms = passes(vocabulary, tokens)
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(5 if args.quick else 15):
            for name, run in arms.items():
                start = time.process_time()
                run()
                times[name].append((time.process_time() - start) / len(tokens) * 1e6)
        for name, values in times.items():
            rows.append(
                {
                    "name": name,
                    "stream": stream,
                    "tokens": len(tokens),
                    "us_per_token": round(statistics.median(values), 3),
                    "spread": [round(min(values), 3), round(max(values), 3)],
                }
            )
            print(f"{stream:8} {name:34} {rows[-1]['us_per_token']:6.2f} us a token")
    if args.json:
        header = {"python": platform.python_version(), "machine": platform.machine()}
        args.json.write_text(json.dumps({**header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
