"""What is compared: functions that decode one prompt and measure it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from time import perf_counter, process_time

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

from ..generation import make_sampler, stream_generate
from ..telemetry import Telemetry


@dataclass
class Run:
    """One decoded stream.

    Args:
        tokens (int): How many, the end token included.
        seconds (float): From the request to the last token, the prompt in them.
        cpu (float): CPU seconds of all threads in that time.
        first (float): Seconds to the first token.
        peak_bytes (int): The largest that MLX held, weights included.
        mtp (Telemetry, optional): What speculation did, where it is known.
        joules (float, optional): Of the whole processor.
    """

    tokens: int
    seconds: float
    cpu: float
    first: float
    peak_bytes: int
    mtp: Telemetry | None = None
    joules: float | None = None

    @property
    def tps(self) -> float:
        """Tokens by seconds: work ahead of the first token is in them."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Filters:
    """As in ``mlx_lm.sample_utils.make_sampler``; the defaults are off."""

    top_p: float = 0.0
    top_k: int = 0


# arm(prompt, temperature, max_tokens, seed)
Arm = Callable[[list[int], float, int, int], Run]


def plain(
    model, tokenizer, filters: Filters, draft_model=None, depth: int | None = None
) -> Arm:
    """``mlx_lm``'s own loop, with its own speculation if there is a draft model."""
    more = {} if draft_model is None else {"num_draft_tokens": depth}

    def arm(prompt, temperature, max_tokens, seed):
        mx.random.seed(seed)
        sampler = mlx_lm_sampler(temperature, **asdict(filters))
        return _timed(
            lambda: mlx_lm.stream_generate(
                model,
                tokenizer,
                prompt,
                max_tokens,
                sampler=sampler,
                draft_model=draft_model,
                **more,
            )
        )

    return arm


def ours(model, tokenizer, filters: Filters, decoder) -> Arm:
    """A ``SpeculativeDecoder``."""

    def arm(prompt, temperature, max_tokens, seed):
        return _timed(
            lambda: stream_generate(
                model,
                tokenizer,
                prompt,
                max_tokens,
                mtp=decoder,
                sampler=make_sampler(temperature, **asdict(filters)),
                seed=seed,
            )
        )

    return arm


def _timed(decode: Callable[[], Iterable]) -> Run:
    mx.synchronize(generation_stream)  # what another arm left behind is not ours
    mx.reset_peak_memory()
    begin, cpu, times, mtp = perf_counter(), process_time(), [], None
    for response in decode():
        times.append(perf_counter())
        cpu_end = process_time()
        mtp = getattr(response, "mtp", None)
    return Run(
        len(times),
        times[-1] - begin,
        cpu_end - cpu,
        times[0] - begin,
        mx.get_peak_memory(),
        mtp,
    )
