"""An engine of its own on mlx-mtp's rounds: pure functions of arrays, compiled.

    python examples/engine_rounds.py

It runs a fixed set of prompts together. Offsets, counts and random keys are arrays with
one entry a row; the host reads one small array a round. The engine decides when to
stop, how to batch and what to do with the state, which is a tree of arrays.
"""

import mlx.core as mx

from mlx_mtp.round import Round, stack_states
from mlx_mtp.sampling import SamplingParams, stream_key

DEPTH, CAPACITY = 3, 512


def start(round_, prompt, params, seed):
    """The state of one row behind its first token, and that token."""
    target, drafter = round_.target, round_.drafter
    rows, caches = mx.array([prompt], mx.int32), target.make_cache()
    draft = drafter.begin(rows, CAPACITY)
    out = target.prefill(rows, caches)
    if drafter.needs_hidden and len(prompt) > 1:  # it pairs a row with the next token
        draft = drafter.prefill(draft, rows[:, 1:], out.hidden[:, :-1], CAPACITY)
    pairs = zip(target.adapters, caches, strict=True)
    state, proposal = round_.begin(
        [adapter.adopt(cache, round_.width, CAPACITY) for adapter, cache in pairs],
        len(prompt),
        draft,
        out.hidden[:, -1:] if drafter.needs_hidden else None,
        stream_key(seed),
        params.arrays(1),
        params.arrays(1),
    )
    tokens, accepted, _ = round_.accept(state, proposal, out.logits[:, -1:])
    state, _ = round_.commit(state, proposal, tokens, accepted)
    return state, tokens[0, 0].item()


def decode(target, drafter, prompts, *, count, temperature=0.0):
    """``count`` tokens or a few more for each prompt."""
    params = SamplingParams(temperature)
    round_ = Round(target, drafter, DEPTH, greedy=params.greedy)
    begun = [start(round_, prompt, params, i) for i, prompt in enumerate(prompts)]
    state, outputs = stack_states([s for s, _ in begun]), [[t] for _, t in begun]
    while min(map(len, outputs)) < count:
        state, result = round_(state, attended=CAPACITY)
        for output, (accepted, _, *tokens) in zip(
            outputs, result.counts.tolist(), strict=True
        ):
            output += tokens[: accepted + 1]  # nothing of a flagged row, with -1
    return outputs


if __name__ == "__main__":
    import mlx_mtp

    model, tokenizer = mlx_mtp.load("demo")
    target = mlx_mtp.as_target(model)
    drafter = mlx_mtp.MTPHeadDrafter(model.mtp_head.head, target)
    asked = [[{"role": "user", "content": f"What is {n} + 68?"}] for n in (5, 57, 570)]
    prompts = [
        tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=False)
        for x in asked
    ]
    for output in decode(target, drafter, prompts, count=100):
        print(tokenizer.decode(output).partition(tokenizer.eos_token)[0])
