"""Speculative decoding of streams: the decoder, its arguments and its iterator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.utils import tree_flatten

from .adaptive import (
    IDLE,
    Acceptance,
    AdaptiveDepth,
    BatchCosts,
    Costs,
    FixedDepth,
    Pace,
)
from .context import Context, Quantisation, refuse_taken
from .drafters import DrafterMismatch
from .memory import Footprint, MemoryPolicy, Watch
from .prefixes import CachedPrefix, load_prefix, save_prefix
from .round import Round
from .sampling import SamplingParams, stream_key
from .shaping import Controller, HostSide, Processor, RowShaper, Sampler
from .state import classify
from .stream import Step, Stream, UnusableLogits
from .targets.vision_prompt import VisionPrompt

__all__ = [
    "Snapshot",
    "SpeculativeDecoder",
    "SpeculativeIterator",
    "Step",
    "UnusableLogits",
    "speculative_step",
]


MAX_ADAPTIVE = 8  # the deepest that "adaptive" goes


@dataclass(frozen=True)
class Snapshot:
    """A prompt cache at one point, made by ``SpeculativeDecoder.snapshot``."""

    marks: tuple[Any, ...]  # one a cache, by its adapter
    prefix: CachedPrefix | None


class SpeculativeDecoder:
    """Speculative decoding of one target by one drafter.

    It holds the compiled rounds, so make it once and decode many streams with it,
    from any thread. Weights that are replaced are noticed at the next stream; a
    weight written in place (``w[:] = x``) or a changed scalar of a layer is not: then
    make a new decoder. When a prompt cache comes back for the next turn, so does the
    drafter's state; it is dropped with the cache.

    Args:
        target (Target): The model.
        drafter (Drafter): Proposes tokens.
        depth (int or str): Drafts a round, 1 to ``drafter.max_depth``; ``"adaptive"``
            chooses it round by round from acceptance and speed, plain decoding
            included. Then the tokens of a sampled stream depend on time, not on its
            seed alone; their distribution does not.
        costs (dict, optional): Seconds of a round by depth, for ``"adaptive"``.

    Raises:
        ValueError: The depth or a cost is out of range.
        DrafterMismatch: The drafter does not fit the target.
    """

    def __init__(
        self,
        target,
        drafter,
        depth: int | Literal["adaptive"] = 3,
        costs: Mapping[int, float] | None = None,
    ):
        check_depth(depth, drafter)
        if drafter.needs_hidden and target.hidden_size is None:
            raise DrafterMismatch(
                f"The {drafter.name} drafter reads hidden rows, which a "
                f"{type(target).__name__} does not give."
            )
        drafter.check(target)
        self.target, self.drafter, self.depth = target, drafter, depth
        self._costs: dict[bool, Costs] = defaultdict(lambda: Costs(costs))
        self.batch_costs = BatchCosts(costs)
        self.batch_acceptance = Acceptance(IDLE)
        self._acceptance: dict[bool, Acceptance] = defaultdict(Acceptance)
        self._rounds: dict[tuple, Round] = {}
        self._weights: list[mx.array] = []
        self._prefixes: WeakKeyDictionary[Any, CachedPrefix] = WeakKeyDictionary()

    def stream(
        self,
        prompt: mx.array | Sequence[int] | VisionPrompt,
        *,
        max_tokens: int = 256,
        params: SamplingParams | None = None,
        draft_params: SamplingParams | None = None,
        sampler: Sampler | None = None,
        processors: Sequence[Processor] = (),
        controller: Controller | None = None,
        stop_tokens: Collection[int] = (),
        caches: list[Any] | None = None,
        seed: int | None = None,
        coupled: bool = False,
        prefill_step_size: int = 2048,
        progress: Callable[[int, int], None] | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 0,
        memory: MemoryPolicy | None = None,
        _make: Callable[..., Stream] = Stream,  # a batch makes rows of its own
    ) -> SpeculativeIterator:
        """Decodes one stream; iterate over the result for ``Step`` objects.

        The tokens have the target's distribution exactly. A block that holds a stop
        token or reaches ``max_tokens`` ends there.

        Args:
            prompt: ``(P,)`` token ids, at least one; or a ``VisionPrompt``.
            max_tokens (int): Tokens to emit. -1 is no limit.
            params (SamplingParams, optional): Default greedy.
            draft_params (SamplingParams, optional): The drafts' own distribution;
                it changes the speed only. Default ``params``.
            sampler (callable, optional): Draws from log-probabilities ``(1, V)`` in
                place of ``params``; accepts a draft that equals its draw.
            processors: ``processor(tokens (N,), logits (1, V)) -> logits``.
            controller (Controller, optional): Forces tokens, such as a
                ``mlx_mtp.reasoning.ThinkingBudget``, which are fed in one forward; or
                masks them, such as a ``GrammarMatcher``.
            stop_tokens: The stream ends with the first of these, which is emitted.
            caches: A prompt cache of the model, updated in place.
            seed (int, optional): Fixes the stream, alone or in any batch.
            coupled (bool): Makes a sampled stream a function of model, prompt and
                seed alone: the same for every drafter and depth, see
                ``ops.verify_coupled``. Not with ``sampler``. Where caches do not
                count their tokens (recurrent ones alone), ``prompt`` is the one
                given here.
            prefill_step_size (int): Prompt tokens a forward.
            progress (callable, optional): ``progress(done, total)`` prompt tokens.
            kv_bits (int, optional): Quantise the keys and values to this.
            kv_group_size (int): Values that share a scale.
            quantized_kv_start (int): Cached tokens from which on they are quantised.
                No round crosses that point, so it is exactly where ``mlx_lm`` has it.
            memory (MemoryPolicy, optional): What happens when drafts would take too
                much memory. Caches to be quantised later count as they are.

        Raises:
            TypeError, ValueError: An argument is of another type or out of range.
            UnsupportedCache: A cache cannot be rolled back; nothing was written.
            UnusableLogits: While iterating, the model gave unusable logits.
            MemoryBudgetExceeded: While iterating, ``memory`` forbids to go on.
        """
        check_limits(max_tokens, prefill_step_size)
        params = params or SamplingParams()
        draft_params = draft_params or params
        greedy = params.greedy or sampler is not None
        if coupled and sampler is not None:
            raise ValueError("coupled does not work with a sampler of your own.")
        keys = stream_key(seed)
        seeds = keys if coupled and not greedy else None
        shaper = _make_shaper(processors, sampler, params, controller, seeds)
        host = HostSide(shaper, controller, self.target.vocab_size)
        prefixes = None if caches is None else self._prefixes
        caches = self.target.make_cache() if caches is None else caches
        refuse_taken(caches)
        orders = params.filter_order, draft_params.filter_order
        context = Context(
            partial(self.round_of, (greedy, coupled and not greedy, *orders)),
            self._pace(greedy, shaper is None and not hasattr(controller, "mask")),
            *_check_prompt(prompt, self.target),
            caches,
            prefixes,
            max_tokens=max_tokens,
            prefill_step_size=prefill_step_size,
            progress=progress,
            quantisation=_check_quantisation(
                caches, kv_bits, kv_group_size, quantized_kv_start
            ),
            memory=self._watch(memory, caches),
        )
        stream = _make(
            context,
            host,
            params.arrays(1),
            draft_params.arrays(1),
            stop_tokens=stop_tokens,
            keys=keys,
        )
        return SpeculativeIterator(stream)

    def feed(
        self,
        tokens: mx.array | Sequence[int] | VisionPrompt,
        caches: list[Any],
        *,
        prefill_step_size: int = 2048,
        progress: Callable[[int, int], None] | None = None,
        memory: MemoryPolicy | None = None,
    ) -> None:
        """Feeds a prompt, or a part of one, into the caches and emits nothing.

        The arguments and errors are those of ``stream``.
        """
        Context(
            partial(self.round_of, (True, False, *2 * [SamplingParams().filter_order])),
            FixedDepth(1),
            *_check_prompt(tokens, self.target),
            caches,
            self._prefixes,
            max_tokens=-1,
            prefill_step_size=prefill_step_size,
            progress=progress,
            memory=self._watch(memory, caches),
        ).feed_prompt()

    def snapshot(self, caches: list[Any]) -> Snapshot:
        """What ``restore`` needs to bring the caches back to what they hold now.

        Keys and values are kept by their length, everything else by reference, so a
        snapshot costs no copy until the next forward.
        """
        adapters = classify(caches, self.target.adapters)
        marks = [a.mark(c) for a, c in zip(adapters, caches, strict=True)]
        return Snapshot(tuple(marks), self._prefixes.get(caches[0]))

    def restore(self, caches: list[Any], snapshot: Snapshot) -> None:
        """Brings the caches, and the drafter's state, back to a snapshot of them.

        Later snapshots are void once the caches are fed again.
        """
        adapters = classify(caches, self.target.adapters)
        for adapter, cache, mark in zip(adapters, caches, snapshot.marks, strict=True):
            adapter.rewind(cache, mark)
        if snapshot.prefix is None:
            self._prefixes.pop(caches[0], None)
        else:
            self._prefixes[caches[0]] = snapshot.prefix

    def with_depth(
        self,
        depth: int | Literal["adaptive"],
        costs: Mapping[int, float] | None = None,
    ) -> SpeculativeDecoder:
        """A decoder of another depth that shares the drafter's state of all caches."""
        other = SpeculativeDecoder(self.target, self.drafter, depth, costs)
        other._prefixes = self._prefixes
        return other

    def fork(self, caches: list[Any]) -> list[Any]:
        """A copy of the caches that goes on by itself, with the drafter's state."""
        copies = deepcopy(caches)
        if prefix := self._prefixes.get(caches[0]):
            self._prefixes[copies[0]] = prefix
        return copies

    def save_prefix(self, file: str, caches: list[Any]) -> None:
        """Writes the drafter's state of the caches to a safetensors file."""
        save_prefix(file, self._prefixes.get(caches[0]), self.drafter)

    def load_prefix(self, file: str, caches: list[Any]) -> bool:
        """Gives the caches the drafter's state that ``save_prefix`` wrote.

        Returns:
            bool: Whether there was one, of this drafter.
        """
        prefix = load_prefix(file, self.drafter)
        if prefix is not None:
            self._prefixes[caches[0]] = prefix
        return prefix is not None

    def _watch(self, policy: MemoryPolicy | None, caches) -> Watch | None:
        """Holds a stream over these caches to a policy."""
        if policy is None or policy.action == "allow":
            return None
        adapters = classify(caches, self.target.adapters)
        measure = partial(Footprint, self.target, self.drafter, caches, adapters)
        return Watch(policy, measure)

    def _pace(self, greedy: bool, plain: bool) -> Pace:
        """Says the depth of a stream's rounds, and whether it may be plain."""
        if self.depth != "adaptive":
            return FixedDepth(self.depth)
        return AdaptiveDepth(
            self._costs[greedy],
            min(MAX_ADAPTIVE, self.drafter.max_depth),
            0 if plain else 1,
            self._acceptance[greedy],
        )

    def round_of(
        self, way: tuple, depth: int, caches, width: int | None = None
    ) -> Round:
        """The round that draws as ``Round.way`` says, compiled once for all streams.

        Its caches have room for rounds of up to ``width`` tokens.
        """
        greedy, coupled, order, draft_order = way
        adapters = classify(caches, self.target.adapters, width or depth + 1)
        # A compiled round has the weights of its trace as constants.
        tree = [self.target.weights(), self.drafter.weights()]
        weights = [x for _, x in tree_flatten(tree)]
        if list(map(id, weights)) != list(map(id, self._weights)):
            self._rounds, self._weights = {}, weights
        key = (depth, way, adapters)
        if key not in self._rounds:
            self._rounds[key] = Round(
                self.target,
                self.drafter,
                depth,
                adapters,
                greedy=greedy,
                coupled=coupled,
                filter_order=order,
                draft_filter_order=draft_order,
            )
        return self._rounds[key]


def speculative_step(
    prompt, target, drafter, *, depth: int | Literal["adaptive"] = 3, **options
) -> SpeculativeIterator:
    """Decodes one stream without ``mlx_lm``.

    The same as ``SpeculativeDecoder(target, drafter, depth).stream(prompt,
    **options)``; keep the decoder to reuse its compiled rounds.

    Example:
        >>> for step in speculative_step(prompt, target, NGramDrafter(), depth=4):
        ...     print(step.token, step.from_draft)
    """
    return SpeculativeDecoder(target, drafter, depth).stream(prompt, **options)


class SpeculativeIterator(Iterator[Step]):
    """One stream in progress, made by ``SpeculativeDecoder.stream``.

    ``telemetry`` is live. The end of the stream, an error, ``close()`` or dropping
    the iterator puts the caches back: they hold the prompt and every emitted token,
    as ``mlx_lm`` leaves them. While the stream runs they are empty.
    """

    def __init__(self, stream: Stream):
        self.stream, self.telemetry = stream, stream.telemetry
        # Nothing in the stream refers to this object, so dropping it closes the
        # generator at once.
        self.steps = stream.run()

    def __next__(self) -> Step:
        while (step := next(self.steps)) is None:
            pass  # between two chunks of the prompt
        return step

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Ends the stream where the caller is and gives the caches back."""
        self.steps.close()


def check_depth(depth, drafter) -> None:
    if depth == "adaptive":
        return
    if not isinstance(depth, Integral) or not 1 <= depth <= drafter.max_depth:
        raise ValueError(
            f"depth must be in [1, {drafter.max_depth}] for the {drafter.name} "
            f"drafter, or 'adaptive', but is {depth!r}."
        )


def check_limits(max_tokens, prefill_step_size) -> None:
    if not isinstance(max_tokens, Integral) or max_tokens < -1 or max_tokens == 0:
        raise ValueError(
            "max_tokens must be a positive integer, or -1 for no limit, but is "
            f"{max_tokens}."
        )
    if prefill_step_size < 1:
        raise ValueError(
            f"prefill_step_size must be positive but is {prefill_step_size}."
        )


def _make_shaper(processors, sampler, params, controller, seeds) -> RowShaper | None:
    """What the host decides of a block; None if the device decides all of it."""
    if not processors and sampler is None and not getattr(controller, "biases", False):
        return None
    arguments = {**params.arrays(1), "filter_order": params.filter_order}
    return RowShaper(processors, sampler, arguments, controller, seeds)


def _check_prompt(prompt, target) -> tuple[mx.array, VisionPrompt | None]:
    """The tokens of a prompt, and the prompt if it has images."""
    if not isinstance(prompt, VisionPrompt):
        return _check_tokens(prompt, target.vocab_size), None
    if not hasattr(target, "read"):
        raise ValueError(
            f"prompt has images, but a {type(target).__name__} takes none."
        )
    size = prompt.embeds.shape[-1]
    if size != target.hidden_size:
        raise ValueError(
            f"prompt has embeddings of size {size} but those of the model have "
            f"{target.hidden_size}."
        )
    return _check_tokens(prompt.tokens, target.vocab_size), prompt


def _check_tokens(prompt, vocab_size: int) -> mx.array:
    prompt = mx.array(prompt)
    if prompt.ndim != 1 or prompt.size == 0:
        raise ValueError(
            "prompt must hold at least one token id, with shape (P,), but has shape "
            f"{prompt.shape}."
        )
    if not mx.issubdtype(prompt.dtype, mx.integer):
        raise TypeError(f"prompt must hold integer token ids but has {prompt.dtype}.")
    low, high = mx.min(prompt).item(), mx.max(prompt).item()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"prompt has token id {low if low < 0 else high}, outside of the "
            f"vocabulary of {vocab_size}."
        )
    return prompt.astype(mx.int32)


def _check_quantisation(caches, bits, group_size, start) -> Quantisation | None:
    if bits is None:
        return None
    if bits not in (2, 3, 4, 5, 6, 8) or group_size not in (32, 64, 128) or start < 0:
        raise ValueError(
            "kv_bits must be 2, 3, 4, 5, 6 or 8, kv_group_size 32, 64 or 128, and "
            f"quantized_kv_start not negative, but they are {bits}, {group_size} and "
            f"{start}."
        )
    if not isinstance(caches, list):
        raise TypeError(
            "With kv_bits the prompt cache must be a list, whose entries are replaced, "
            f"but it is a {type(caches).__name__}."
        )
    for i, cache in enumerate(caches):
        if type(cache).__name__ == "RotatingKVCache":
            raise ValueError(
                f"kv_bits cannot be used: prompt cache entry {i} is a RotatingKVCache, "
                "which mlx_lm does not quantise."
            )
    return Quantisation(bits, group_size, start)
