"""One stream driven round by round, to time the parts of a round.

It calls what the driver calls, but waits after every part, so the parts add up to
more than a round takes.
"""

from __future__ import annotations

from time import perf_counter

import mlx.core as mx

from mlx_mtp.round import Proposal, Round, compiled
from mlx_mtp.sampling import SamplingParams, stream_key
from mlx_mtp.stream import bucket


def make_round(target, drafter, depth: int, params: SamplingParams) -> Round:
    return Round(
        target,
        drafter,
        depth,
        greedy=params.greedy,
        filter_order=params.filter_order,
    )


def begin(
    round_: Round,
    prompt,
    params: SamplingParams,
    capacity: int,
    draft_params: SamplingParams | None = None,
) -> dict:
    """The state of a stream whose prompt is cached and whose first token is drawn."""
    target, drafter = round_.target, round_.drafter
    prompt = mx.array(prompt)[None]
    length, caches = prompt.shape[1], target.make_cache()
    out = target.prefill(prompt, caches)
    draft_state, hidden = drafter.begin(prompt, capacity), None
    if drafter.needs_hidden:
        hidden = out.hidden[:, -1:]
        draft_state = drafter.prefill(
            draft_state, prompt[:, 1:], out.hidden[:, :-1], bucket(length)
        )
    leaves = [
        adapter.adopt(cache, round_.width, capacity)
        for adapter, cache in zip(target.adapters, caches, strict=True)
    ]
    state, proposal = round_.begin(
        leaves,
        length,
        draft_state,
        hidden,
        stream_key(0),
        params.arrays(1),
        (draft_params or params).arrays(1),
    )
    tokens, accepted, _ = round_.accept(state, proposal, out.logits[:, -1:])
    state, _ = round_.commit(state, proposal, tokens, accepted)
    mx.eval(state)
    return state


def seconds_by_part(
    round_: Round, state: dict, attended: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each part of ``rounds`` rounds after one to warm up; ``build`` is the
    host's time for the graph of a whole round."""
    draft, verify = (compiled(x, attended) for x in (round_.draft, round_.verify))
    accept, commit = mx.compile(round_.accept), mx.compile(round_.commit)
    clock = _Clock()
    for _ in range(rounds + 1):
        clock.start()
        round_(state, attended)
        clock.stop("build")
        # Each buffer keeps one owner, as in a stream, so that it is written in place.
        proposal = Proposal(*draft(state))
        state = {**state, "draft": None}
        clock.stop("draft", proposal)
        verified, logits = verify(state, proposal)
        state = None
        clock.stop("verify", verified, logits)
        tokens, accepted, _ = accept(verified, proposal, logits)
        clock.stop("accept", tokens, accepted)
        state, _ = commit(verified, proposal, tokens, accepted)
        verified = proposal = None
        clock.stop("commit", state)
    return {part: values[1:] for part, values in clock.seconds.items()}


class _Clock:
    def __init__(self):
        self.seconds: dict[str, list[float]] = {}
        self._mark = 0.0

    def start(self) -> None:
        self._mark = perf_counter()

    def stop(self, part: str, *arrays) -> None:
        """Ends a part once ``arrays`` are there, and starts the next."""
        mx.eval(arrays)
        now = perf_counter()
        self.seconds.setdefault(part, []).append(now - self._mark)
        self._mark = now
