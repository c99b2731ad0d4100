"""Recurrent layers of any model, fed the rows of a block one by one.

A rejected draft must leave no trace in a recurrent state, and models do not give the
state behind each row. So while the model is traced, the modules that take a recurrent
cache are called once a row, and the view of the cache keeps every state. All others
still see the whole block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..state import SteppedView

# A class has one __call__ for all threads.
_LOCK = threading.RLock()


def find_steppers(model: nn.Module, tokens: mx.array, caches: Sequence[Any]) -> set:
    """The classes of the innermost modules that get a recurrent cache of ``caches``.

    Builds one forward of ``tokens`` and computes nothing.
    """
    found, open_calls = set(), []

    def watch(call, module, args, kwargs):
        if _view_in(args, kwargs) is None:
            return call(module, *args, **kwargs)
        if open_calls:
            open_calls[-1] = True
        open_calls.append(False)
        try:
            return call(module, *args, **kwargs)
        finally:
            if not open_calls.pop():
                found.add(_caller(type(module)))

    with _patched({_caller(type(m)) for m in model.modules()}, watch):
        model(tokens, cache=caches)
    return found


@contextmanager
def stepping(classes: set) -> Iterator[None]:
    """Within, modules of ``classes`` that get a ``SteppedView`` take row by row."""
    with _patched(classes, _step):
        yield


@contextmanager
def calls_of(module: nn.Module) -> Iterator[list]:
    """Within, the list gets the first argument and the result of each call of it by
    this thread."""
    seen, thread = [], threading.get_ident()

    def watch(call, called, args, kwargs):
        result = call(called, *args, **kwargs)
        if called is module and threading.get_ident() == thread:
            seen.append((args[0], result))
        return result

    with _patched({_caller(type(module))}, watch):
        yield seen


@contextmanager
def weights_transposed() -> Iterator[None]:
    """Within, linear layers transpose their weights at once, not by a node a call.

    For a trace: its weights are constants, so no round has these nodes.
    """
    thread = threading.get_ident()

    def linear(call, layer, args, kwargs):
        if threading.get_ident() != thread or kwargs:
            return call(layer, *args, **kwargs)
        (x,), weight = args, layer.weight.T
        mx.eval(weight)
        return mx.addmm(layer.bias, x, weight) if "bias" in layer else x @ weight

    with _patched({nn.Linear}, linear):
        yield


@contextmanager
def _patched(classes, around):
    """Within, calls of modules go through ``around(call, module, args, kwargs)``."""
    with _LOCK:
        calls = {c: c.__call__ for c in classes if c is not None}
        try:
            for c, call in calls.items():
                c.__call__ = _bind(call, around)
            yield
        finally:
            for c, call in calls.items():
                c.__call__ = call


def _caller(module_class: type) -> type | None:
    """The class that a module inherits its ``__call__`` from."""
    return next((c for c in module_class.__mro__ if "__call__" in vars(c)), None)


def _bind(call, around):
    def wrapper(self, *args, **kwargs):
        return around(call, self, args, kwargs)

    return wrapper


def _step(call, module, args, kwargs):
    view = _view_in(args, kwargs)
    rows = None if view is None else _rows(args, kwargs)
    if not rows:
        return call(module, *args, **kwargs)
    return _join(
        [
            call(
                module,
                *(_row(x, i, rows) for x in args),
                **{
                    # Some recurrent layers rotate, and are told where the block begins.
                    name: x + i if name == "offset" else _row(x, i, rows)
                    for name, x in kwargs.items()
                },
            )
            for i in range(rows)
        ]
    )


def _view_in(args, kwargs) -> SteppedView | None:
    values = [*args, *kwargs.values()]
    return next((x for x in values if isinstance(x, SteppedView)), None)


def _rows(args, kwargs) -> int:
    """T of the first array ``(B, T, ...)``."""
    values = [*args, *kwargs.values()]
    return next((x.shape[1] for x in values if isinstance(x, mx.array)), 0)


def _row(x, i: int, rows: int):
    is_block = isinstance(x, mx.array) and x.ndim > 1 and x.shape[1] == rows
    return x[:, i : i + 1] if is_block else x


def _join(outputs: list):
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_join(list(parts)) for parts in zip(*outputs, strict=True))
    if isinstance(first, mx.array):
        return mx.concatenate(outputs, axis=1)
    return first
