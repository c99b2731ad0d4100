"""The two decoding loops of a session: speculative, and mlx_lm's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from .generation import (
    MTP,
    Depth,
    bind_sampler,
    drawing,
    find_decoder,
    plain_decoder,
    plain_stream,
)
from .memory import MemoryPolicy
from .shaping import Controller, Processor
from .speculative import SpeculativeDecoder, Step
from .state import UnsupportedCache, classify
from .targets import as_target, reads_images
from .thinking import ControllerProcessor

PREFILL_STEP = 2048


class Loop(Protocol):
    """Decodes behind prompt caches that the caller keeps."""

    def make_cache(self) -> list[Any]:
        """New prompt caches."""

    def feed(self, tokens: Sequence[int], caches, *, progress) -> None:
        """Feeds tokens and emits nothing."""

    def snapshot(self, caches) -> Any:
        """What ``restore`` needs."""

    def restore(self, caches, snapshot, surplus: int) -> bool:
        """Takes the newest ``surplus`` tokens back; False when that cannot be done."""

    def stream(
        self,
        prompt: Sequence[int],
        caches,
        *,
        max_tokens: int,
        controller: Controller | None,
        processors: Sequence[Processor],
        stop_tokens: Collection[int],
        seed: int | None,
        progress: Callable[[int, int], None],
    ) -> Iterator[Step]:
        """As ``SpeculativeDecoder.stream``. ``progress`` may raise to stop it."""


def find_loop(
    model, mtp: MTP, depth: Depth, sampler, memory: MemoryPolicy | None = None
) -> Loop:
    """The loop that ``mtp`` asks for, as ``stream_generate`` chooses it."""
    drawing(sampler)  # refuses what is no sampler, for both loops
    decoder = None if mtp is None else find_decoder(model, mtp, depth)
    if decoder is not None and _adapters(decoder.target) is not None:
        return SpeculativeLoop(decoder, sampler, memory)
    if reads_images(model):
        plain = plain_decoder(model)
        return SpeculativeLoop(plain, sampler, memory, _make=plain_stream)
    return PlainLoop(model, sampler)


class SpeculativeLoop:
    def __init__(
        self,
        decoder: SpeculativeDecoder,
        sampler,
        memory: MemoryPolicy | None = None,
        **more,
    ):
        self.decoder, self.memory, self.more = decoder, memory, more
        self.make_cache = decoder.target.make_cache
        self.feed = partial(decoder.feed, memory=memory)
        self.snapshot = decoder.snapshot
        self.drawing = drawing(sampler)

    def restore(self, caches, snapshot, surplus):
        self.decoder.restore(caches, snapshot)
        return True

    def stream(self, prompt, caches, *, seed, **options):
        if seed is not None and "sampler" in self.drawing:
            mx.random.seed(seed)
        return self.decoder.stream(
            prompt,
            caches=caches,
            seed=seed,
            memory=self.memory,
            **self.drawing,
            **self.more,
            **options,
        )


class PlainLoop:
    """``mlx_lm``'s own loop, for models without a drafter and caches of any class."""

    def __init__(self, model, sampler):
        self.model, self.sampler = model, sampler
        self.make_cache = partial(make_prompt_cache, model)
        self.adapters = _adapters(as_target(model))

    def feed(self, tokens, caches, *, progress):
        tokens = mx.array(tokens)
        for start in range(0, tokens.size, PREFILL_STEP):
            progress(start, tokens.size)
            self.model(tokens[None, start : start + PREFILL_STEP], cache=caches)
            mx.eval([cache.state for cache in caches])

    def snapshot(self, caches):
        if self.adapters is None:
            return None
        return [a.mark(c) for a, c in zip(self.adapters, caches, strict=True)]

    def restore(self, caches, snapshot, surplus):
        if self.adapters is None:
            return can_trim_prompt_cache(caches) and (
                trim_prompt_cache(caches, surplus) == surplus
            )
        for adapter, cache, mark in zip(self.adapters, caches, snapshot, strict=True):
            adapter.rewind(cache, mark)
        return True

    def stream(
        self,
        prompt,
        caches,
        *,
        max_tokens,
        controller,
        processors,
        stop_tokens,
        seed,
        progress,
    ):
        if seed is not None:
            mx.random.seed(seed)
        adapter = None if controller is None else ControllerProcessor(controller)
        steps = generate_step(
            mx.array(prompt),
            self.model,
            max_tokens=max_tokens,
            sampler=bind_sampler(self.sampler, seed, caches, len(prompt)),
            logits_processors=[*processors, *([adapter] if adapter else [])],
            prompt_cache=caches,
            prefill_step_size=PREFILL_STEP,
            prompt_progress_callback=progress,
        )
        for i, (token, logprobs) in enumerate(steps):
            forced = adapter is not None and i in adapter.forced
            yield Step(token, False, lambda row=logprobs: row, forced)
            if token in stop_tokens or i + 1 == max_tokens:
                return
            if adapter is not None:
                adapter.check()


def _adapters(target):
    """How the caches of a target are taken apart, None if they cannot be."""
    try:
        return classify(target.make_cache(), target.adapters)
    except UnsupportedCache:
        return None
