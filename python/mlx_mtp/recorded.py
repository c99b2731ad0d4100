"""A function whose graph is built once."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

from ._ext import Recordings


class Recorded:
    """``function``, whose graph is recorded at the first call and then evaluated again.

    A call then makes one node for 48 of the graph, and MLX neither builds nor walks
    over those in it. Results are those of the function, bit by bit, and arrays that
    nothing else holds are written over as in its graph. On Metal, where this has not
    been tried, and where the operations are on several streams, it is the function.

    What depends on no argument is evaluated at the first call, and then constant.

    Args:
        function (callable): From trees of arrays to a tree of arrays, without side
            effects, random numbers without a key, and reads of an array's value: best
            what ``mx.compile`` gives. It is called once for each tree, its shapes and
            dtypes, and stream, in each thread. It is called every time within
            ``mx.grad`` and the like, and for trees of something else than arrays and
            None in dicts with strings as keys, lists, tuples and named tuples.

    Example:
        >>> double = Recorded(mx.compile(lambda x: {"y": x + x}))
        >>> double(mx.array(1)), double(mx.array(2))
        ({'y': array(2, dtype=int32)}, {'y': array(4, dtype=int32)})
    """

    def __init__(self, function: Callable):
        self.function = function
        self._thread = _Thread()

    def __call__(self, *args) -> Any:
        return self._thread.recordings.call(self.function, args)


class _Thread(threading.local):
    """What belongs to the streams of a thread and ends with it."""

    def __init__(self):
        self.recordings = Recordings()


# A whole round may be under way then, and OpenBLAS hangs if it has to end within.
atexit.register(Recordings.synchronize)
