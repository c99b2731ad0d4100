"""What a round costs the host, and whether it costs more in a larger cache.

    python bench/round_host.py [--quick] [--json FILE]

Host: CPU microseconds to make the graph of one round (K = 3, greedy, MTP head) of
narrow untrained Qwen3.5 models, as a stream does by the recorded call, by the compiled
function that it records, and by running the Python code of the round. The Gated
DeltaNet recurrence is one node, as on a GPU.

Graph: the same for one round of the demo model, depth 3: ``recorded``, the compiled
``whole`` and its parts, with the nodes of each. ``tree`` is a compiled call that does
nothing to such a state. These calls follow each other closely. ``paused`` are recorded
ones 10 ms after the last, as long as a round takes: by then the processor's caches may
hold other things.

Loop: where the calling thread's CPU time goes in streams of the demo model, depth 3,
microseconds a round: ``build``, the graph of the next round; ``submit``, MLX's walk
over it to its kernels, which any program has that runs this model; ``wait``, the read
of the last round; ``python``, the loop itself. ``loop`` is all but ``submit``. Kernels
are not in it: they run on MLX's thread. ``python_parts`` splits ``python``, one
function a pass: ``read`` a round, with the counters; ``take`` its tokens; ``hand_over``
it to MLX; the rest is the loop and the caller. ``unrecorded`` is the same without
recordings. ``bare`` is the loop alone, around one
round that is there already, again and again. ``beside`` is by the clock: how much
longer a round of a stream takes than the evaluation, ``model``, of the graph of such a
round that is there already; in pairs of streams.

Capacity: time and extra peak memory of rounds whose attention reads the first 256
slots, in key and value buffers of 256 to 65,536 slots. Both must not grow.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from time import perf_counter, sleep, thread_time

import common
from common import median, spread

DEPTH = 3
LOOP_BAR_US = 400
PAUSE = 0.01  # seconds
BARS_US = {16: 700, 48: 2000}  # compiled, by layers


def main():
    p = common.parser(__doc__)
    args = p.parse_args()
    header = common.start(args)
    common.show_header(header)
    rows = []
    for layers in (16,) if args.quick else (16, 48):
        rows.append(host_row(layers, calls=50 if args.quick else 200))
        show_host(rows[-1])
    for sampled in (False, True):
        rows.append(graph_row(sampled, calls=100 if args.quick else 500))
        show_graph(rows[-1])
    rows.append(loop_row(streams=3 if args.quick else 10))
    show_loop(rows[-1])
    capacities = (256, 65536) if args.quick else (256, 1024, 4096, 16384, 65536)
    for row in capacity_rows(capacities, rounds=20 if args.quick else 40):
        rows.append(row)
        show_capacity(row)
    common.write(args.json, header, rows)
    loop = next(row for row in rows if row["name"] == "loop")
    raise SystemExit(not args.quick and loop["us_a_round"]["loop"] > LOOP_BAR_US)


def stream(layers: int, capacity: int, **sizes):
    """A narrow untrained model in mid-stream: its round and the state of one."""
    import rounds

    from mlx_mtp.drafters import HeadConfig, MTPHead, MTPHeadDrafter
    from mlx_mtp.sampling import SamplingParams
    from mlx_mtp.targets import as_target

    config = narrow_config(layers, **sizes)
    target = as_target(narrow_model(config))
    drafter = MTPHeadDrafter(MTPHead(HeadConfig.from_dict(config)), target)
    params = SamplingParams()
    round_ = rounds.make_round(target, drafter, DEPTH, params)
    return round_, rounds.begin(round_, list(range(1, 9)), params, capacity)


def narrow_config(layers: int, heads: int = 2, head_dim: int = 32) -> dict:
    return {
        "model_type": "qwen3_5",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "vocab_size": 256,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
        "full_attention_interval": 4,
    }


def narrow_model(config: dict):
    import mlx.core as mx
    from mlx_lm.models import qwen3_5

    mx.random.seed(0)
    args = qwen3_5.ModelArgs(model_type="qwen3_5", text_config=config)
    model = qwen3_5.Model(args)
    model.eval()
    mx.eval(model.parameters())
    return model


def host_row(layers: int, calls: int) -> dict:
    from mlx_mtp.round import compiled

    round_, state = stream(layers, 256)
    begin = thread_time()
    round_(state, 256)
    first = thread_time() - begin
    whole = compiled(round_.whole, 256).function
    seconds = common.alternate(
        {
            "recorded": lambda: round_(state, 256),
            "compiled": lambda: whole(state),
            "uncompiled": lambda: round_.whole(state, 256),
        },
        calls,
        clock=thread_time,
    )
    return {
        "name": "round_host",
        "layers": layers,
        "depth": DEPTH,
        "recorded_us": 1e6 * median(seconds["recorded"]),
        "compiled_us": 1e6 * median(seconds["compiled"]),
        "uncompiled_us": 1e6 * median(seconds["uncompiled"]),
        "first_call_us": 1e6 * first,
        "bar_us": BARS_US[layers],
        "spread": {name: spread(values) for name, values in seconds.items()},
    }


def graph_row(sampled: bool, calls: int) -> dict:
    """Microseconds of the calling thread, and nodes, for each part of a round."""
    import mlx.core as mx
    import rounds
    from streams import Subject

    from mlx_mtp.round import Proposal, compiled
    from mlx_mtp.sampling import SamplingParams

    subject, params = Subject("demo"), SamplingParams(1.0 if sampled else 0.0)
    round_ = rounds.make_round(subject.target, subject.drafter, DEPTH, params)
    prompt = subject.encode("What is 5736 + 4868?")
    state = rounds.begin(round_, prompt, params, 512)
    whole, draft, verify = (
        compiled(part, 256).function
        for part in (round_.whole, round_.draft, round_.verify)
    )
    accept, commit = mx.compile(round_.accept), mx.compile(round_.commit)
    same = mx.compile(lambda state: state)
    proposal = Proposal(*draft(state))
    verified, logits = verify(state, proposal)
    tokens, accepted, _ = accept(verified, proposal, logits)
    mx.eval(proposal, verified, logits, tokens, accepted)
    arms = {
        "recorded": lambda: round_(state, 256),
        "whole": lambda: whole(state),
        "tree": lambda: same(state),
        "draft": lambda: draft(state),
        "verify": lambda: verify(state, proposal),
        "accept": lambda: accept(verified, proposal, logits),
        "commit": lambda: commit(verified, proposal, tokens, accepted),
    }
    seconds = common.alternate(arms, calls, clock=thread_time)
    return {
        "name": "graph",
        "sampled": sampled,
        "depth": DEPTH,
        "us": {part: 1e6 * median(values) for part, values in seconds.items()},
        "paused_us": paused_us(arms["recorded"], calls // 5),
        "nodes": {part: count_nodes(call()) for part, call in arms.items()},
    }


def paused_us(call, calls: int) -> float:
    seconds = []
    for _ in range(calls):
        sleep(PAUSE)
        begin = thread_time()
        result = call()
        seconds.append(thread_time() - begin)
        del result  # freeing it is not counted
    return 1e6 * median(seconds)


def count_nodes(arrays) -> int:
    """How many operations the graph behind arrays has that are not computed yet."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    file, arrays = StringIO(), [x for _, x in tree_flatten(arrays) if x is not None]
    mx.export_to_dot(file, *arrays)
    return file.getvalue().count("rectangle")


def loop_row(streams: int) -> dict:
    """One row: the medians over streams."""
    from streams import Subject

    subject = Subject("demo")
    prompt = subject.encode("What is 5736 + 4868?")
    with _thread_clock():
        parts = _loop_parts(subject, prompt, streams)
        with _unrecorded():
            unrecorded = _loop_parts(subject, prompt, streams)
        # A method and the phase within it, which is another part.
        methods = {
            "read": ("_read", "wait"),
            "take": ("_take", None),
            "hand_over": ("_submit", "submit"),
        }
        found = {
            part: median(_loop_parts(subject, prompt, streams, *method)["inner"])
            for part, method in methods.items()
        }
    us = {part: median(values) for part, values in parts.items() if part != "inner"}
    found["rest"] = us["python"] - sum(found.values())
    return {
        "name": "loop",
        "depth": DEPTH,
        "bar_us": LOOP_BAR_US,
        "us_a_round": us,
        "unrecorded_us": {
            part: median(unrecorded[part]) for part in ("loop", "submit")
        },
        "python_parts": found,
        "bare_us": median(_bare_loop(subject, prompt) for _ in range(streams)),
        "beside_us": _beside_model(subject, prompt, streams),
        "spread": spread(parts["loop"]),
    }


def _loop_parts(
    subject, prompt, streams: int, method: str | None = None, phase: str | None = None
) -> dict[str, list[float]]:
    """Microseconds a round of each part, stream by stream; ``inner`` is a method of the
    stream without a phase."""
    parts: dict[str, list[float]] = {}
    for turn in range(streams + 1):
        steps = subject.decoder(DEPTH).stream(prompt, max_tokens=160)
        next(steps)
        with _timed(method) as spent:
            before, begin = dict(steps.telemetry.seconds), thread_time()
            for _ in steps:
                pass
            total, rounds = thread_time() - begin, steps.telemetry.rounds
        seconds = steps.telemetry.seconds
        found = {
            part: seconds[part] - before.get(part, 0)
            for part in ("build", "submit", "wait")
        }
        found["python"] = total - sum(found.values()) - seconds["close"]
        found["loop"] = found["build"] + found["wait"] + found["python"]
        found["inner"] = sum(spent) - found.get(phase, 0.0)
        for part, value in found.items():
            if turn:  # the first compiles
                parts.setdefault(part, []).append(1e6 * value / rounds)
    return parts


def _beside_model(subject, prompt, pairs: int) -> dict[str, float]:
    """Medians over pairs of streams, microseconds of a round, and the spread."""
    import mlx.core as mx
    import rounds

    from mlx_mtp.sampling import SamplingParams

    params, seconds = SamplingParams(), {"stream": [], "model": []}
    round_ = rounds.make_round(subject.target, subject.drafter, DEPTH, params)
    for turn in range(pairs + 1):
        steps = subject.decoder(DEPTH).stream(prompt, max_tokens=160)
        next(steps)
        begin = perf_counter()
        for _ in steps:
            pass
        took = perf_counter() - begin - steps.telemetry.seconds["close"]
        state, alone = rounds.begin(round_, prompt, params, 256), 0.0
        for _ in range(steps.telemetry.rounds):
            state, result = round_(state, 256)
            begin = perf_counter()
            mx.eval(state, result.counts)
            alone += perf_counter() - begin
        if turn:  # the first compiles
            seconds["stream"].append(took / steps.telemetry.rounds)
            seconds["model"].append(alone / steps.telemetry.rounds)
    both = zip(seconds["stream"], seconds["model"], strict=True)
    beside = [1e6 * (stream - model) for stream, model in both]
    low, middle, high = statistics.quantiles(beside, n=4, method="inclusive")
    us = {name: 1e6 * median(values) for name, values in seconds.items()}
    return {**us, "beside": middle, "quartiles": [low, high]}


def _bare_loop(subject, prompt) -> float:
    """Microseconds a round of the loop where graphs and evaluation cost nothing."""
    import mlx.core as mx

    from mlx_mtp.round import Round

    call, async_eval, found = Round.__call__, mx.async_eval, []

    def same(round_, state, attended):
        if not found:
            state, result = call(round_, state, attended)
            mx.eval(state, result)
            full = mx.array([[DEPTH] * 2 + [5] * (DEPTH + 1)])  # all accepted
            found.extend((state, result._replace(counts=full)))
        return dict(found[0]), found[1]

    Round.__call__, mx.async_eval = same, lambda *arrays: None
    try:
        steps = subject.decoder(DEPTH).stream(prompt, max_tokens=2000)
        for _ in range(2 + DEPTH):
            next(steps)
        begin = thread_time()
        for _ in steps:
            pass
        return 1e6 * (thread_time() - begin) / steps.telemetry.rounds
    finally:
        Round.__call__, mx.async_eval = call, async_eval


@contextmanager
def _timed(name: str | None) -> Iterator[list[float]]:
    """The CPU seconds of every call of a method of the stream."""
    from mlx_mtp.stream import Stream

    spent: list[float] = []
    if name is None:
        yield spent
        return
    method = getattr(Stream, name)

    def timed(*args, **options):
        begin = thread_time()
        result = method(*args, **options)
        spent.append(thread_time() - begin)
        return result

    setattr(Stream, name, timed)
    try:
        yield spent
    finally:
        setattr(Stream, name, method)


@contextmanager
def _unrecorded() -> Iterator[None]:
    from mlx_mtp.recorded import Recorded

    call = Recorded.__call__
    Recorded.__call__ = lambda self, *args: self.function(*args)
    try:
        yield
    finally:
        Recorded.__call__ = call


@contextmanager
def _thread_clock() -> Iterator[None]:
    """Phases are counted in CPU time of the calling thread."""
    import mlx_mtp.telemetry

    wall, mlx_mtp.telemetry.time = mlx_mtp.telemetry.time, _ThreadClock
    try:
        yield
    finally:
        mlx_mtp.telemetry.time = wall


class _ThreadClock:
    perf_counter = staticmethod(thread_time)


def capacity_rows(capacities, rounds: int) -> list[dict]:
    """One row a capacity. The streams take turns, so that they see the same noise."""
    seconds = {capacity: [] for capacity in capacities}
    extra = dict.fromkeys(capacities, 0)
    rounds_, states = {}, {}
    for capacity in capacities:
        rounds_[capacity], states[capacity] = stream(4, capacity, heads=4, head_dim=64)
    for _ in range(rounds + 2):
        for capacity, round_ in rounds_.items():
            took, more = _one_round(round_, states, capacity)
            seconds[capacity].append(took)
            extra[capacity] = max(extra[capacity], more)
    return [
        {
            "name": "round_capacity",
            "capacity": capacity,
            "attended": 256,
            "round_us": 1e6 * median(seconds[capacity][2:]),
            "extra_peak_bytes": extra[capacity],
            "spread": spread(seconds[capacity][2:]),
        }
        for capacity in capacities
    ]


def _one_round(round_, states: dict, capacity: int) -> tuple[float, int]:
    """Seconds and extra peak bytes of the next round of a stream."""
    import mlx.core as mx

    mx.reset_peak_memory()
    before, begin = mx.get_active_memory(), perf_counter()
    state, _ = round_(states.pop(capacity), 256)  # popped: a second owner is a copy
    mx.eval(state)
    states[capacity] = state
    return perf_counter() - begin, mx.get_peak_memory() - before


def show_host(row: dict) -> None:
    print(
        f"{row['layers']} layers: {row['recorded_us']:.0f} us recorded (bar "
        f"{row['bar_us']}), {row['compiled_us']:.0f} us compiled, "
        f"{row['uncompiled_us']:.0f} us uncompiled, first call "
        f"{row['first_call_us'] / 1e3:.0f} ms"
    )


def show_graph(row: dict) -> None:
    parts = ", ".join(
        f"{part} {row['us'][part]:.0f} ({row['nodes'][part]})" for part in row["us"]
    )
    way = "sampled" if row["sampled"] else "greedy"
    print(f"graph, {way}, us (nodes): {parts}, paused {row['paused_us']:.0f}")


def show_loop(row: dict) -> None:
    for title in ("us_a_round", "unrecorded_us", "python_parts"):
        parts = ", ".join(f"{part} {us:.0f}" for part, us in row[title].items())
        print(f"loop, {title}: {parts}")
    print(
        f"loop: bar {row['bar_us']}, spread {row['spread']:.0%}, bare "
        f"{row['bare_us']:.0f}"
    )
    beside = row["beside_us"]
    low, high = beside["quartiles"]
    print(
        f"by the clock: stream {beside['stream']:.0f}, model {beside['model']:.0f}, "
        f"beside it {beside['beside']:.0f} ({low:.0f} to {high:.0f})"
    )


def show_capacity(row: dict) -> None:
    print(
        f"capacity {row['capacity']}: {row['round_us']:.0f} us a round, "
        f"{row['extra_peak_bytes'] / 1e6:.2f} MB more at the peak, "
        f"spread {row['spread']:.0%}"
    )


if __name__ == "__main__":
    main()
