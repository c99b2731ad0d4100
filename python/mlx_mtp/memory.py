"""Memory: what a stream needs, what a machine has, and what to do about it."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx.utils import tree_flatten

Action = Literal["allow", "fallback", "fail", "shrink"]

SHARE = 0.75  # of the system's memory, where the device names no working set
FUSED = {64, 80, 128}  # head sizes for which Metal keeps no scores of a long block
PREFILL = 2048  # prompt tokens a forward
WEIGHTS = 0.7  # of a budget; the rest is for caches and work
SIZES = (0.5, 1, 2, 4, 8, 14, 32, 70, 120, 235, 400, 700)  # 10^9 parameters
QUANTISED = (8, 6, 5, 4, 3)  # bits of a weight
SCALES = 0.5  # bits of a weight for its group's scale and bias
STEP = 256  # slots by which mlx_lm's caches grow


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that decoding takes at its peak, by what they are for.

    Args:
        weights (int): The model.
        drafter (int): The head, or the draft model.
        caches (int): Keys, values and recurrent states for all the context.
        draft_state (int): The drafter's own.
        workspace (int): What a chunk of the prompt or a round takes for a moment.
        others (int): Whatever else MLX holds.
    """

    weights: int = 0
    drafter: int = 0
    caches: int = 0
    draft_state: int = 0
    workspace: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = [f"{k.replace('_', ' ')} {gigabytes(v)}" for k, v in vars(self).items()]
        return f"{gigabytes(self.total)} ({', '.join(parts)})"


class MemoryBudgetExceeded(RuntimeError):
    """Decoding would take more memory than the policy allows.

    Args:
        plan (MemoryPlan): What it would take.
        budget (int): The bytes there are.
    """

    def __init__(self, plan: MemoryPlan, budget: int, what: str):
        self.plan, self.budget = plan, budget
        super().__init__(f"[memory] {_over(what, plan, budget)} {WAY_OUT}")


WAY_OUT = (
    "Use a shorter context, a lower depth, quantised keys and values (kv_bits) or a "
    "smaller model; or a MemoryPolicy with another action or budget."
)


@dataclass(frozen=True)
class MemoryPolicy:
    """What happens when drafts would take too much memory.

    ``load`` checks it before it reads the weights, for ``context`` tokens. A stream
    checks it before the prompt, for all slots that it is about to reserve, and again
    whenever it needs more.

    Args:
        budget (int, optional): Bytes for everything. Default: the working set that
            MLX recommends for the device, else three quarters of the system's memory.
        action (str): ``"fallback"`` decodes plainly, with the reason in
            ``telemetry.fallback``; ``"shrink"`` takes the largest depth that fits, and
            plain decoding when none does; ``"fail"`` raises ``MemoryBudgetExceeded``;
            ``"allow"`` goes on.
        context (int): Tokens that ``load`` plans for.

    Example:
        >>> policy = MemoryPolicy(budget=12 * 2**30, action="shrink")
        >>> model, tokenizer = load("demo", memory=policy)
    """

    budget: int | None = None
    action: Action = "fallback"
    context: int = 4096

    def __post_init__(self):
        if self.action not in get_args(Action):
            raise ValueError(
                f"action must be one of {', '.join(get_args(Action))} but is "
                f"{self.action!r}."
            )
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"budget must not be negative but is {self.budget}.")
        if self.context < 1:
            raise ValueError(f"context must be positive but is {self.context}.")

    @property
    def limit(self) -> int:
        """The budget in bytes."""
        return recommended_budget() if self.budget is None else self.budget

    def choose(
        self, plan: Callable[[int], MemoryPlan], depth: int, what: str
    ) -> tuple[int, str | None]:
        """The depth that may be used, and why it is not the one asked for.

        Args:
            plan (callable): ``plan(depth)``, what rounds of that depth take.
            depth (int): The depth asked for.
            what (str): For the message, such as ``"4096 tokens"``.

        Raises:
            MemoryBudgetExceeded: It does not fit and the action is ``"fail"``.
        """
        wanted, limit = plan(depth), self.limit
        if self.action == "allow" or wanted.total <= limit:
            return depth, None
        what = f"Decoding {what} with {depth or 'no'} drafts a round"
        if self.action == "fail":
            raise MemoryBudgetExceeded(wanted, limit, what)
        smaller = range(depth - 1, 0, -1) if self.action == "shrink" else ()
        best = next((d for d in smaller if plan(d).total <= limit), 0)
        return best, f"memory: {_over(what, wanted, limit)}"


class Footprint:
    """The sizes of a target, a drafter and their state, from shapes alone.

    Nothing of the target is computed. A draft model is fed one token.

    Args:
        target (Target): The model.
        drafter (Drafter, optional): ``None`` for plain decoding.
        caches (list, optional): The prompt cache, if it is not the target's own.
        adapters (sequence, optional): Of these caches. Default: the target's.

    ``held`` is the bytes of the caches as they are.
    """

    def __init__(self, target, drafter=None, caches=None, adapters=None):
        self.drafter = drafter
        self._adapters = target.adapters if adapters is None else adapters
        own = target.make_cache()
        caches = own if caches is None else caches
        pairs = zip(self._adapters, caches, strict=True)
        self.held = nbytes([a.arrays(c) for a, c in pairs])
        # Behind a lazy forward every cache has arrays, and so shapes.
        self._caches = caches if self.held else copy.deepcopy(caches)
        token = mx.zeros((1, 1), mx.int32)
        probe = own if self.held else self._caches
        logits = target.prefill(token, probe).logits
        self._work = [_Work.of(target, logits.dtype)]
        self.weights, self.drafter_weights = nbytes(target.weights()), 0
        if drafter is not None:
            self.drafter_weights = nbytes(drafter.weights())
            self._draft_state = drafter.begin(token, 1)
            if model := getattr(drafter, "model", None):  # it reads the prompt too
                self._work.append(_Work.of(model, logits.dtype))

    def plan(
        self,
        capacity: int,
        depth: int,
        *,
        prompt: int = 0,
        chunk: int = PREFILL,
        others: int = 0,
    ) -> MemoryPlan:
        """What decoding takes at its peak, in the prompt or in the rounds.

        Args:
            capacity (int): Tokens to make room for.
            depth (int): Drafts a round; 0 is plain decoding.
            prompt (int): Tokens in the caches behind the prompt, 0 for rounds alone.
            chunk (int): Prompt tokens a forward.
            others (int): Bytes of whatever else MLX holds.
        """
        own = MemoryPlan(self.weights, self.drafter_weights, others=others)
        if depth:
            state = nbytes(self.drafter.grow(self._draft_state, capacity))
            own = replace(own, draft_state=state)
        rounds = replace(
            own,
            caches=self._size(capacity, depth),
            workspace=self._work[0].round(depth, capacity),
        )
        if not prompt:
            return rounds
        chunks = [chunk, PREFILL]
        work = max(
            w.prompt(prompt, n) for w, n in zip(self._work, chunks, strict=False)
        )
        fed = replace(own, caches=self._size(prompt, 0), workspace=work)
        return max(fed, rounds, key=lambda plan: plan.total)

    def _size(self, capacity: int, depth: int) -> int:
        """Bytes of all caches, with the copy of one that grows."""
        if not depth:
            capacity = -(-capacity // STEP) * STEP
        total = largest = 0
        for adapter, cache in zip(self._adapters, self._caches, strict=True):
            leaves = adapter.adopt(cache, depth + 1, capacity)
            size = nbytes(leaves)
            if depth:
                size *= adapter.versions
            total, largest = total + size, max(largest, size)
        return total + largest


@dataclass(frozen=True)
class _Work:
    """What the rows of a forward take for a moment."""

    vocab_size: int
    widest: int  # outputs of the widest layer
    heads: int
    head_size: int
    itemsize: int

    @classmethod
    def of(cls, target, dtype: mx.Dtype):
        config, vocab = _config(target), target.vocab_size
        experts = config.get("num_experts_per_tok") or 1
        shapes = [
            x.shape
            for name, x in tree_flatten(target.weights())
            if name.endswith(".weight") and x.ndim > 1 and x.shape[-2] != vocab
        ]
        widths = [s[-2] * (experts if len(s) == 3 else 1) for s in shapes]
        heads = config.get("num_attention_heads") or 1
        size = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
        return cls(vocab, max(widths, default=0), heads, size, dtype.size)

    def prompt(self, tokens: int, chunk: int) -> int:
        """Bytes of the largest forward of a prompt, whose logits nobody reads."""
        whole = tokens // chunk * chunk
        return max(
            self._rows(min(chunk, whole), whole), self._rows(tokens - whole, tokens)
        )

    def round(self, depth: int, attended: int) -> int:
        """Bytes of a round, its logits and those of the last one included."""
        return self._rows(depth + 1, attended) + (depth + 1) * 16 * self.vocab_size

    def _rows(self, rows: int, attended: int) -> int:
        blocks = mx.default_device() != mx.cpu and self.head_size in FUSED
        scores = 0 if blocks else 2 * self.heads * attended
        return rows * self.itemsize * (4 * self.widest + scores)


class Watch:
    """A policy held to one stream.

    Args:
        policy (MemoryPolicy): The policy.
        measure (callable): Gives the ``Footprint`` of the stream.
    """

    def __init__(self, policy: MemoryPolicy, measure: Callable[[], Footprint]):
        self.policy, self._measure = policy, measure

    def start(
        self, capacity: int, depth: int, prompt: int, chunk: int
    ) -> tuple[int, str | None]:
        """As ``MemoryPolicy.choose``, in front of a prompt; see ``Footprint.plan``."""
        try:
            self.footprint = self._measure()
        except Exception as error:  # such as a drafter that fails
            if self.policy.action == "fail":
                raise
            return 0, f"memory: there is no plan: {error}"
        others = self._others(self.footprint.held)
        plan = partial(
            self.footprint.plan, capacity, prompt=prompt, chunk=chunk, others=others
        )
        return self.policy.choose(plan, depth, f"{capacity} tokens")

    def grow(self, capacity: int, depth: int) -> tuple[int, str | None]:
        """The same once rounds need more room; they then have the old caches too."""
        plan = partial(self.footprint.plan, capacity, others=self._others(0))
        return self.policy.choose(plan, depth, f"{capacity} tokens")

    def _others(self, held: int) -> int:
        own = self.footprint.weights + self.footprint.drafter_weights + held
        return max(mx.get_active_memory() - own, 0)


def rows_fit(
    policy: MemoryPolicy, footprint: Footprint, capacity: int, depth: int, rows: int
) -> bool:
    """Whether a batch of ``rows`` with room for ``capacity`` tokens each may be made.

    While it is, the arrays of the batch before are still there.
    """
    own = footprint.weights + footprint.drafter_weights
    others = max(mx.get_active_memory() - own, 0)
    row = footprint.plan(capacity, depth)
    total = own + others + rows * (row.total - own)
    return policy.action == "allow" or total <= policy.limit


def recommended_budget() -> int:
    """Bytes of MLX's recommended working set, or of SHARE of the system's memory."""
    info = mx.device_info(mx.default_device())
    size = info.get("max_recommended_working_set_size")
    return int(size) if size else int(SHARE * system_memory())


def system_memory() -> int:
    """Bytes of the device's memory, or of the system's."""
    info = mx.device_info(mx.default_device())
    size = info.get("memory_size") or info.get("total_memory")
    return int(size or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def best_dtype() -> mx.Dtype:
    """The fastest one for weights that are not quantised, on the default device.

    float16 on Apple's M1 and M2, which have no arithmetic of their own for bfloat16;
    float32 on a CPU.
    """
    if mx.default_device() == mx.cpu:
        return mx.float32
    chip = mx.device_info(mx.default_device()).get("device_name", "")
    return mx.float16 if re.search(r"\bM[12]\b", chip) else mx.bfloat16


def best_bits(parameters: int, budget: int) -> int | None:
    """The widest weights of so many parameters that fit, as wide as ``best_dtype`` if
    they need not be quantised; None if none do."""
    room, widest = 8 * WEIGHTS * budget / parameters, 8 * best_dtype().size
    return next((bits for bits in (widest, *QUANTISED) if _stored(bits) <= room), None)


def largest_model(bits: int, budget: int) -> float | None:
    """The largest usual size, in 10^9 parameters, of weights of so many bits that fits;
    None if none does."""
    room = 8 * WEIGHTS * budget / _stored(bits) / 1e9
    return max((size for size in SIZES if size <= room), default=None)


def _stored(bits: int) -> float:
    """Bits of a weight, in all."""
    return bits + SCALES if bits in QUANTISED else bits


def gigabytes(size: int) -> str:
    """For a person: ``"1.234 GB"``."""
    return f"{size / 1e9:.3f} GB"


def nbytes(tree) -> int:
    """Bytes of the arrays in a tree, shared ones counted once."""
    arrays = {id(x): x for _, x in tree_flatten(tree) if isinstance(x, mx.array)}
    return sum(x.nbytes for x in arrays.values())


def _over(what: str, plan: MemoryPlan, budget: int) -> str:
    return f"{what} takes {plan} of a budget of {gigabytes(budget)}."


def _config(target) -> dict[str, Any]:
    model = getattr(target, "model", None)
    args = getattr(model, "args", None) or getattr(model, "config", None)
    config = getattr(args, "text_config", None) or args
    if config is None:
        return {}
    return config if isinstance(config, dict) else vars(config)
