"""Drop-in for mlx_lm's ``generate`` and ``stream_generate``, with ``mtp=``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    GenerationResponse,
    generation_stream,
    wired_limit,
)
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .adaptive import FixedDepth
from .context import Context, refuse_taken
from .drafters import Drafter, NGramDrafter, head_drafter
from .grammar import Grammar
from .memory import MemoryPolicy
from .ops import sample, verify_coupled
from .reasoning import ThinkingBudget
from .sampling import SamplingParams, check_seed, stream_key
from .shaping import Controller
from .speculative import (
    SpeculativeDecoder,
    SpeculativeIterator,
    check_depth,
    check_limits,
)
from .state import UnsupportedCache, cached_tokens
from .stops import StopStrings
from .stream import Stream
from .targets import VisionPrompt, as_target, reads_images, vocab_size
from .telemetry import Telemetry
from .thinking import (
    ControllerProcessor,
    make_budget,
    make_guide,
    reasoning_config,
)

DEFAULT_DEPTH = 3

Depth = int | Literal["adaptive"]
MTP = None | Literal["auto"] | int | Drafter | SpeculativeDecoder


@dataclass
class Response(GenerationResponse):
    """``mlx_lm``'s response with what speculation did.

    ``logprobs`` is computed when it is read.

    Args:
        mtp (Telemetry, optional): Live counters; ``None`` when ``mtp=None``.
    """

    mtp: Telemetry | None = None

    @property
    def logprobs(self) -> mx.array:
        return self._logprobs() if callable(self._logprobs) else self._logprobs

    @logprobs.setter
    def logprobs(self, value):
        self._logprobs = value

    def top_logprobs(self, n: int) -> list[tuple[int, float]]:
        """The ``n`` likeliest tokens of this position and their log-probabilities.

        The likeliest first, the lowest id first on ties; all of them if there are
        fewer.

        Raises:
            ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"n must not be negative but is {n}.")
        row = self.logprobs.astype(mx.float32)
        ids = mx.argsort(-row)[:n]  # stable
        return list(zip(ids.tolist(), row[ids].tolist(), strict=True))


class Sampler:
    """A sampler whose distribution is known, so that drafts are accepted by ratio.

    It is also an ordinary ``mlx_lm`` sampler.
    """

    def __init__(self, params: SamplingParams, coupled: bool = False):
        self.params, self.coupled = params, coupled

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draws from log-probabilities ``(..., V)`` with MLX's global random state."""
        if self.params.greedy:
            return mx.argmax(logprobs, axis=-1)
        draws = mx.random.uniform(shape=(*logprobs.shape[:-1], 2))
        p = self.params
        return sample(
            logprobs,
            draws,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            filter_order=p.filter_order,
        )[0]


class _CoupledDraws:
    """A coupled ``Sampler`` for ``mlx_lm``'s loop: one stream, a token at a call."""

    def __init__(self, params: SamplingParams, seed: int | None, position: int):
        self.key, self.position = stream_key(seed), position
        self.params, self.order = params.arrays(1), params.filter_order

    def __call__(self, logprobs: mx.array) -> mx.array:
        tokens, _, _ = verify_coupled(
            logprobs[:, None],
            mx.zeros((1, 0), mx.int32),
            seed=self.key,
            position=mx.array([self.position]),
            **self.params,
            filter_order=self.order,
        )
        self.position += 1
        return tokens[:, 0]


def bind_sampler(sampler, seed: int | None, caches, prompt_tokens: int):
    """What ``mlx_lm``'s loop has to draw with, to draw as ``sampler`` does here."""
    if not getattr(sampler, "coupled", False) or sampler.params.greedy:
        return sampler
    cached = cached_tokens(caches) if caches else 0
    return _CoupledDraws(sampler.params, seed, (cached or 0) + prompt_tokens)


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] = (),
    *,
    coupled: bool = False,
):
    """As ``mlx_lm.sample_utils.make_sampler``: filters first, then temperature.

    The result gives ratio acceptance. With XTC (``xtc_probability > 0``) or
    ``min_tokens_to_keep > 1`` it is ``mlx_lm``'s own sampler, whose drafts are
    accepted by comparison.

    Args:
        coupled (bool): Makes a stream a function of model, prompt and ``seed`` alone:
            the same tokens for every drafter and depth and without drafts. Drafts are
            accepted somewhat less often than by ratio.

    Raises:
        ValueError: An argument is out of range, or ``coupled`` with XTC or
            ``min_tokens_to_keep > 1``.
    """
    if xtc_probability > 0 or (min_p and min_tokens_to_keep > 1):
        if coupled:
            raise ValueError(
                "coupled does not work with xtc_probability or min_tokens_to_keep > 1."
            )
        return mlx_lm.sample_utils.make_sampler(
            temp,
            top_p,
            min_p,
            min_tokens_to_keep,
            top_k,
            xtc_probability,
            xtc_threshold,
            list(xtc_special_tokens),
        )
    return Sampler(
        SamplingParams(
            temperature=temp,
            top_k=max(top_k, 0),
            top_p=top_p if 0 < top_p < 1 else 1.0,
            min_p=min_p,
            filter_order="temperature_last",
        ),
        coupled,
    )


def stream_generate(
    model,
    tokenizer,
    prompt: str | mx.array | Sequence[int] | VisionPrompt,
    max_tokens: int = 256,
    draft_model=None,
    stream=generation_stream,
    *,
    mtp: MTP = "auto",
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    thinking_budget: int | ThinkingBudget | None = None,
    grammar: Grammar | Mapping | None = None,
    memory: MemoryPolicy | None = None,
    **kwargs,
) -> Iterator[Response]:
    """``mlx_lm.stream_generate`` with multi-token prediction.

    The text has the same distribution as without speculation, and at temperature 0
    the same tokens (up to near-ties that a wider forward may round otherwise).

    Args:
        model: A model of ``mlx_lm``; or one of ``mlx_vlm``, whose prompts are a
            ``VisionPrompt`` or text, and which decodes by this package's loop alone.
        tokenizer: The model's, or its processor.
        mtp: ``None`` is ``mlx_lm`` itself; ``"auto"`` uses the model's MTP head if it
            has one; an int is the depth for that head; a ``Drafter`` drafts at depth
            ``num_draft_tokens``; a ``SpeculativeDecoder`` is used as it is.
        seed (int, optional): Fixes the stream. Where ``mlx_lm`` or a sampler of its
            own draws, it sets MLX's global random state.
        stop (str or list of str, optional): The stream ends in front of the first of
            these strings, with reason ``"stop"``. Text that may become one comes late.
        thinking_budget (int or ThinkingBudget, optional): Ends thoughts after so many
            tokens, in every mode. An int is that limit for the thoughts of this model,
            with one token of ``max_tokens`` kept for the answer; a ``ThinkingBudget``
            serves one stream.
        grammar (Grammar or dict, optional): What the answer must fit, in every mode; a
            dict is a JSON schema. It begins behind the thought that the prompt has
            opened, and ends the stream. Needs llguidance.
        memory (MemoryPolicy, optional): What happens when drafts would take too much
            memory. Default: the policy that the model was loaded with, if any.
        num_draft_tokens (int or str): Depth for ``"auto"`` and a ``Drafter``;
            ``"adaptive"`` chooses it round by round, see ``SpeculativeDecoder``.
            Default: ``3``.
        sampler: Any ``mlx_lm`` sampler. One of ``mlx_mtp.make_sampler`` gives ratio
            acceptance.
        logits_processors: As in ``mlx_lm``; see ``mlx_mtp.shaping`` for
            ``checkpoint`` and ``restore``.
        kwargs: The other arguments of ``mlx_lm.stream_generate``. With a cache of an
            unknown class, ``input_embeddings`` or ``draft_model`` the stream is
            ``mlx_lm``'s own, and ``response.mtp.fallback`` says why.

    Yields:
        Response: ``mlx_lm``'s fields and ``mtp``.

    Raises:
        ValueError: ``mtp`` asks for a head that the model does not have, or an
            argument is out of range.
        TypeError: An argument is unknown, or ``sampler`` cannot be called.
        ReasoningError: The thinking budget cannot be kept, or the grammar is not
            supported.
        ImportError: llguidance is missing.
        MemoryBudgetExceeded: The policy forbids to go on.
    """
    check_limits(max_tokens, kwargs.get("prefill_step_size", 2048))
    tokenizer = wrapped(tokenizer, model)
    images = prompt if isinstance(prompt, VisionPrompt) else None
    prompt = _encode(tokenizer, prompt) if images is None else images.tokens
    controller = _controller(
        model, tokenizer, prompt, thinking_budget, grammar, max_tokens
    )
    request = _Request(
        model,
        tokenizer,
        prompt,
        images,
        max_tokens,
        draft_model,
        stream,
        seed,
        controller,
        memory_policy(model, memory),
        kwargs,
    )
    if draft_model is not None:
        _check_draft_model(request, "thinking_budget" if grammar is None else "grammar")
    _check_images(request)
    check_seed(seed)
    stops = None if stop is None else StopStrings(stop)
    responses = _responses(request, mtp)
    yield from responses if stops is None else _until(responses, stops)


def generate(model, tokenizer, prompt, verbose: bool = False, **kwargs) -> str:
    """``mlx_lm.generate`` with multi-token prediction; see ``stream_generate``."""
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose:
        print()
        print("=" * 10)
        print("\n".join(summary(response)))
    return text


def summary(response: Response) -> list[str]:
    """Lines for a person: speeds, memory, and what speculation did."""
    lines = [
        f"Prompt: {response.prompt_tokens} tokens, "
        f"{response.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {response.peak_memory:.3f} GB",
    ]
    mtp = response.mtp
    if mtp is not None and mtp.rounds:
        lines.append(
            f"MTP: {mtp.accepted} of {mtp.drafted} drafts accepted "
            f"({mtp.acceptance_rate:.1%}), {mtp.tokens_per_round:.2f} tokens per round"
        )
    if mtp is not None and mtp.fallback:
        lines.append(f"MTP: {mtp.fallback}")
    return lines


@dataclass(frozen=True)
class _Request:
    """What one stream was asked for, with the arguments of ``mlx_lm``'s function."""

    model: Any
    tokenizer: TokenizerWrapper
    prompt: mx.array
    images: VisionPrompt | None
    max_tokens: int
    draft_model: Any
    stream: mx.Stream
    seed: int | None
    controller: Controller | None
    memory: MemoryPolicy | None
    options: dict[str, Any]

    @property
    def sampler(self):
        return self.options.get("sampler")


class _Decoders:
    """The decoders of one model, kept so that their rounds compile once.

    Those of the drafters that were used last; each by its depths.
    """

    KEPT = 4  # drafters

    def __init__(self, model):
        self.target = as_target(model)
        self.of = head = getattr(model, "mtp_head", None)
        self.head = head and head_drafter(head.head, self.target)
        self.made: dict[Drafter, dict[Depth, SpeculativeDecoder]] = {}

    def get(self, drafter: Drafter, depth: Depth) -> SpeculativeDecoder:
        check_depth(depth, drafter)
        made = self.made.pop(drafter, {})
        if depth not in made:
            known = next(iter(made.values()), None)
            made[depth] = (
                known.with_depth(depth)
                if known
                else SpeculativeDecoder(self.target, drafter, depth)
            )
        self.made[drafter] = made  # the newest
        if len(self.made) > self.KEPT:
            del self.made[next(iter(self.made))]
        return made[depth]


def find_decoder(model, mtp: MTP, depth: Depth) -> SpeculativeDecoder | None:
    """The decoder that ``mtp`` asks for; None if "auto" finds no head, and for models
    that are not made to generate text.

    Raises:
        ValueError: ``mtp`` or ``depth`` is none, or the model has no head for a depth.
    """
    if getattr(model, "mtp_never", None):
        return None
    if isinstance(mtp, SpeculativeDecoder):
        return mtp
    depth_given = isinstance(mtp, Integral) and not isinstance(mtp, bool)
    if not (mtp == "auto" or depth_given or hasattr(mtp, "propose")) or (
        isinstance(mtp, type)
    ):
        raise ValueError(
            f"mtp must be None, 'auto', a depth, a drafter or a decoder but is {mtp!r}."
        )
    if mtp == "auto" and getattr(model, "mtp_head", None) is None:
        return None
    decoders = getattr(model, "mtp_decoders", None)
    if decoders is None or decoders.of is not getattr(model, "mtp_head", None):
        decoders = model.mtp_decoders = _Decoders(model)
    if mtp == "auto":
        return decoders.get(decoders.head, depth)
    if not depth_given:
        return decoders.get(mtp, depth)
    if decoders.head is None:
        raise ValueError(
            f"mtp is a depth but there is no head: {missing_head(model)}. Load a model "
            "that has one with mlx_mtp.load, or pass a drafter."
        )
    return decoders.get(decoders.head, int(mtp))


def _check_draft_model(request: _Request, controlled_by: str) -> None:
    """Raises ValueError for what ``mlx_lm``'s speculative decoding cannot do."""
    if request.controller is not None:
        raise ValueError(f"{controlled_by} does not work with draft_model.")
    if getattr(request.sampler, "coupled", False):
        raise ValueError("A coupled sampler does not work with draft_model.")


def _check_images(request: _Request) -> None:
    """Raises ValueError for images and options that a model does not take."""
    if not reads_images(request.model):
        if request.images is not None:
            kind = type(request.model).__module__
            raise ValueError(f"prompt has images, but a model of {kind} takes none.")
        return
    if (reason := _plain_reason(request)) is not None:
        raise ValueError(f"A model of mlx_vlm is decoded here alone: {reason}.")


def _responses(request: _Request, mtp: MTP) -> Iterator[Response]:
    """The responses of our loop, or of ``mlx_lm``'s where that has to decode."""
    steps, reason = (None, None) if mtp is None else _speculate(request, mtp)
    if request.seed is not None and (
        steps is None or "sampler" in drawing(request.sampler)
    ):
        mx.random.seed(request.seed)
    if steps is None and reads_images(request.model):
        steps = _open(request, plain_decoder(request.model), _make=plain_stream)
        steps.telemetry.fallback = reason
    if steps is not None:
        return _respond(request, steps)
    return _plain(request, None if mtp is None else Telemetry(fallback=reason))


def _speculate(
    request: _Request, mtp: MTP
) -> tuple[SpeculativeIterator | None, str | None]:
    """The stream, or None and the reason why ``mlx_lm`` has to decode it."""
    reason = _plain_reason(request)
    if reason is None or mtp != "auto":
        depth = request.options.get("num_draft_tokens", DEFAULT_DEPTH)
        decoder = find_decoder(request.model, mtp, depth)
        if decoder is None:
            reason = missing_head(request.model)
    if reason is not None:
        return None, reason
    try:
        return _open(request, decoder), None
    except UnsupportedCache as error:
        return None, str(error)


def plain_decoder(model) -> SpeculativeDecoder:
    """For models that ``mlx_lm`` cannot run, with ``plain_stream`` as ``_make``."""
    if (decoder := getattr(model, "mtp_plain", None)) is None:
        decoder = SpeculativeDecoder(as_target(model), NGramDrafter(), 1)
        model.mtp_plain = decoder
    return decoder


def plain_stream(context: Context, *args, **options) -> Stream:
    """A stream that never drafts."""
    context.use_pace(FixedDepth(0))
    return Stream(context, *args, **options)


def memory_policy(model, memory: MemoryPolicy | None) -> MemoryPolicy | None:
    """The policy given, or else the one that ``load`` left on the model."""
    return getattr(model, "mtp_memory", None) if memory is None else memory


def missing_head(model) -> str:
    """Why a model has no head."""
    for name in ("mtp_never", "mtp_reason"):
        if reason := getattr(model, name, None):
            return reason
    return "the model has no MTP head"


def _plain_reason(request: _Request) -> str | None:
    """Why these arguments need ``mlx_lm``'s own loop, if they do."""
    if request.draft_model is not None:
        return "draft_model is mlx_lm's own speculative decoding"
    if request.options.get("input_embeddings") is not None:
        return "input_embeddings is not supported with speculation"
    return None


def _controller(
    model, tokenizer, prompt, budget, grammar, max_tokens
) -> Controller | None:
    """What steers the stream: its thinking budget, its grammar, or both in turn."""
    if grammar is None and (budget is None or isinstance(budget, ThinkingBudget)):
        return budget
    config, prompt = reasoning_config(model, tokenizer), prompt.tolist()
    if budget is not None and not isinstance(budget, ThinkingBudget):
        limit = None if max_tokens == -1 else max_tokens
        budget = make_budget(
            config,
            tokenizer,
            prompt,
            budget,
            max_tokens=limit,
            vocab_size=vocab_size(model),
        )
    if grammar is None:
        return budget
    if not isinstance(grammar, Grammar):
        grammar = Grammar.json_schema(grammar)
    return make_guide(config, tokenizer, prompt, grammar, budget)


def drawing(sampler) -> dict:
    """How a decoder draws as ``sampler`` does: its ``params`` and ``sampler``."""
    if sampler is None or sampler is greedy_sampler:
        return {}
    if isinstance(sampler, Sampler):
        return {"params": sampler.params, "coupled": sampler.coupled}
    if not callable(sampler):
        raise TypeError(f"sampler must be callable but is a {type(sampler).__name__}.")
    return {"sampler": sampler}


def _open(
    request: _Request, decoder: SpeculativeDecoder, **more
) -> SpeculativeIterator:
    options = request.options
    known = {
        "sampler",
        "logits_processors",
        "prompt_cache",
        "prefill_step_size",
        "prompt_progress_callback",
        "num_draft_tokens",
        "max_kv_size",
        "kv_bits",
        "kv_group_size",
        "quantized_kv_start",
        "input_embeddings",
    }
    if unknown := sorted(set(options) - known):
        raise TypeError(
            f"stream_generate() got an unexpected keyword argument {unknown[0]!r}"
        )
    caches, size = options.get("prompt_cache"), options.get("max_kv_size")
    if caches is None and size is not None and not reads_images(request.model):
        caches = make_prompt_cache(request.model, size)
    return decoder.stream(
        request.images or request.prompt,
        max_tokens=request.max_tokens,
        **drawing(request.sampler),
        processors=options.get("logits_processors") or (),
        controller=request.controller,
        stop_tokens=request.tokenizer.eos_token_ids,
        caches=caches,
        seed=request.seed,
        prefill_step_size=options.get("prefill_step_size", 2048),
        progress=options.get("prompt_progress_callback"),
        kv_bits=options.get("kv_bits"),
        kv_group_size=options.get("kv_group_size", 64),
        memory=request.memory,
        quantized_kv_start=options.get(
            "quantized_kv_start", DEFAULT_QUANTIZED_KV_START
        ),
        **more,
    )


def _until(responses: Iterator[Response], stops: StopStrings) -> Iterator[Response]:
    """The responses up to a stop string, which is left out."""
    with closing(responses):
        for response in responses:
            response.text, met = stops.push(response.text)
            if met:
                response.finish_reason = "stop"
                responses.close()  # the caches are whole at the last response
            elif response.finish_reason:
                response.text += stops.finish()
            yield response
            if met:
                return


def _respond(request: _Request, steps: SpeculativeIterator) -> Iterator[Response]:
    with wired_limit(request.model, [request.stream]), steps:
        yield from _detokenize(request, steps)


def _detokenize(request: _Request, steps: SpeculativeIterator) -> Iterator[Response]:
    tokenizer, prompt_tokens = request.tokenizer, request.prompt.size
    detokenizer = tokenizer.detokenizer
    start = time.perf_counter()
    count = 0

    def response(step, reason):
        return Response(
            text=detokenizer.last_segment,
            token=step.token,
            logprobs=lambda: step.logprobs,
            from_draft=step.from_draft,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=count / (time.perf_counter() - start),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            mtp=steps.telemetry,
        )

    while True:
        with mx.stream(request.stream):
            step = next(steps)
        count += 1
        if count == 1:
            prompt_tps = prompt_tokens / (time.perf_counter() - start)
            start = time.perf_counter()
        stopped = step.token in tokenizer.eos_token_ids
        if not stopped:
            detokenizer.add_token(step.token)
        if stopped or count == request.max_tokens:
            break
        yield response(step, None)
    with mx.stream(request.stream):
        steps.close()
    detokenizer.finalize()
    yield response(step, "stop" if stopped else "length")


def _plain(request: _Request, telemetry: Telemetry | None) -> Iterator[Response]:
    """``mlx_lm``'s own stream, as our responses."""
    refuse_taken(request.options.get("prompt_cache") or ())
    options = {
        "draft_model": request.draft_model,
        "stream": request.stream,
        **request.options,
    }
    options["sampler"] = bind_sampler(
        request.sampler,
        request.seed,
        options.get("prompt_cache"),
        request.prompt.size,
    )
    adapter = None
    if request.controller is not None:
        processors = options.get("logits_processors") or ()
        adapter = ControllerProcessor(request.controller)
        options["logits_processors"] = [*processors, adapter]
    names = [f.name for f in fields(GenerationResponse)]
    for r in mlx_lm.stream_generate(
        request.model, request.tokenizer, request.prompt, request.max_tokens, **options
    ):
        if telemetry is not None:
            telemetry.emitted += 1
        yield Response(**{name: getattr(r, name) for name in names}, mtp=telemetry)
        if adapter is not None and r.finish_reason is None:
            adapter.check()


def wrapped(tokenizer, model) -> TokenizerWrapper:
    """A tokenizer, or that of a processor, with the stops of the model's config."""
    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    stops = model.config.eos_token_id if reads_images(model) else None
    stops = [stops] if isinstance(stops, int) else stops
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    return TokenizerWrapper(tokenizer, eos_token_ids=stops)


def _encode(tokenizer, prompt) -> mx.array:
    """Token ids, with the special tokens that mlx_lm would add."""
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(
            tokenizer.bos_token
        )
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    return mx.array(prompt)
