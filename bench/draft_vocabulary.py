"""What drafting from a part of the vocabulary saves, and what exactness costs it.

    python bench/draft_vocabulary.py [--quick] [--json FILE]

K drafts are projected, drawn and verified: by the whole output head, and by ``tokens``
rows of it. ``spread`` is the time to write the K rows of the part at full width, as
``verify_draft`` reads them: what an op that takes the part itself could save at most.
"""

from __future__ import annotations

import common

K, HIDDEN, VOCAB = 3, 1024, 248320
SIZES = (8192, 32768, 65536)


def main() -> None:
    args = common.parser(__doc__).parse_args()
    header = common.start(args)
    common.show_header(header)
    import mlx.core as mx

    mx.random.seed(0)
    head = 0.03 * mx.random.normal((VOCAB, HIDDEN))
    target = mx.random.normal((1, K + 1, VOCAB))
    mx.eval(head, target)
    rows = [measure(size, head, target, args.quick) for size in SIZES]
    common.write(args.json, header, rows)


def measure(size, head, target, quick: bool) -> dict:
    import mlx.core as mx
    import mlx.nn as nn

    from mlx_mtp import ops
    from mlx_mtp.drafters.vocabulary import VocabularyPart, spread

    layer = nn.Linear(HIDDEN, VOCAB, bias=False)
    layer.weight = head
    ids = mx.random.permutation(VOCAB)[:size].tolist()
    part = VocabularyPart(ids, VOCAB, [layer])
    hidden, draws = mx.random.normal((1, HIDDEN)), mx.random.uniform(shape=(1, K + 2))
    few = mx.random.normal((1, K, size))
    mx.eval(hidden, draws, few)

    def round_of(logits):
        drafted = [logits(hidden) for _ in range(K)]
        drawn = [ops.sample(row, draws[:, :2], temperature=1.0) for row in drafted]
        tokens, stats = (mx.stack(list(x), axis=1) for x in zip(*drawn, strict=True))
        logits = mx.stack(drafted, axis=1)
        out = ops.verify_draft(
            target, tokens, logits, uniforms=draws, draft_stats=stats, temperature=1.0
        )
        mx.eval(out)

    arms = {
        "whole": lambda: round_of(layer),
        "part": lambda: round_of(part.logits),
        "spread": lambda: mx.eval(spread(few, part.ids, VOCAB)),
    }
    seconds = common.alternate(arms, 5 if quick else 15)
    ms = {name: 1e3 * common.median(values) for name, values in seconds.items()}
    print(
        f"{size:6d} of {VOCAB} tokens: whole {ms['whole']:.1f} ms, part "
        f"{ms['part']:.1f} ms, of which spread {ms['spread']:.2f} ms"
    )
    return {"tokens": size, "ms": ms}


if __name__ == "__main__":
    main()
