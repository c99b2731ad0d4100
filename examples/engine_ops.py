"""An engine of its own that takes one op from mlx-mtp: the one that accepts drafts.

    python examples/engine_ops.py MODEL "Say it twice: ..."

The loop, the cache and the drafter are the engine's; the model is any of mlx_lm's whose
cache can be trimmed. What is emitted has exactly the model's distribution at this
temperature, whatever the drafter says.
"""

import sys

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlx_mtp import verify_draft


def look_up(tokens, depth):
    """What followed the newest token where it stood before."""
    for i in range(len(tokens) - 2, -1, -1):
        if tokens[i] == tokens[-1]:
            return tokens[i + 1 : i + 1 + depth]
    return []


def decode(model, prompt, *, count, temperature=0.0, depth=4, seed=0, ends=()):
    """Emits up to ``count`` tokens behind ``prompt``, a list."""
    cache, tokens, key = make_prompt_cache(model), list(prompt), mx.random.key(seed)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=cache)
    while count > 0:
        drafts = look_up(tokens, min(depth, count - 1))
        logits = model(mx.array([[tokens[-1], *drafts]]), cache=cache)
        # A coin for each draft, and two for what comes behind the accepted ones.
        key, now = mx.random.split(key)
        found, accepted, _ = verify_draft(
            logits,
            mx.array([drafts], mx.int32).reshape(1, -1),
            uniforms=mx.random.uniform(shape=(1, len(drafts) + 2), key=now),
            temperature=temperature,
        )
        accepted = accepted.item()  # the one wait of a round
        if accepted < 0:
            raise RuntimeError("the model gave NaN")
        trim_prompt_cache(cache, len(drafts) - accepted)
        for token in found[0, : accepted + 1].tolist():
            tokens.append(token)
            count -= 1
            yield token
            if token in ends:
                return


if __name__ == "__main__":
    import mlx_lm

    model, tokenizer = mlx_lm.load(sys.argv[1])
    ids = tokenizer.encode(sys.argv[2])
    text = decode(model, ids, count=100, ends=tokenizer.eos_token_ids)
    print(tokenizer.decode(list(text)))
