"""Requests from any thread, decoded together by one thread that owns the batch."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import mlx.core as mx

from .batch import BatchIterator, BatchOutput
from .context import MAX_RESERVED, bucket
from .memory import Footprint, MemoryPolicy, rows_fit
from .speculative import SpeculativeDecoder
from .state import cached_tokens
from .stream import Step

Admit = Callable[[int, int, int], bool]


class QueueFull(RuntimeError):
    """As many requests wait as may; try again later."""


class RequestRefused(RuntimeError):
    """The memory policy does not take a request even when nothing else runs."""


class SchedulerClosed(RuntimeError):
    """The scheduler takes no more requests; ``__cause__`` is its failure, if any."""


@dataclass(frozen=True)
class _End:
    finish: str
    error: BaseException | None = None


class Handle(Iterator[Any]):
    """One request. Iterate over it, in one thread, for what ``read`` gave of each step.

    The iteration blocks until there is more, ends with the request, and raises the
    error that ended it.

    Attributes:
        finish (str, optional): Why it ended: ``"stop"``, ``"length"``, ``"cancelled"``
            or ``"error"``; None while it goes on.
        telemetry (Telemetry, optional): Of its stream, once it is admitted.
        admitted_at, ended_at (float, optional): ``time.monotonic()`` of these.
    """

    def __init__(self, scheduler: Scheduler, prompt, options, read, client):
        self.prompt, self.options, self.client = prompt, options, client
        self.finish: str | None = None
        self.telemetry = None
        self.admitted_at: float | None = None
        self.ended_at: float | None = None
        self._scheduler, self._read = scheduler, read
        self._items: SimpleQueue = SimpleQueue()
        self._end: _End | None = None

    def __next__(self):
        if self._end is not None:
            raise StopIteration
        item = self._items.get()
        if not isinstance(item, _End):
            return item
        self._end = item
        if item.error is not None:
            raise item.error
        raise StopIteration

    def cancel(self) -> None:
        """Ends the request at the next turn; nothing if it has ended."""
        self._scheduler._cancel(self)

    @property
    def tokens_per_second(self) -> float:
        """Since it was admitted, its prompt included."""
        if self.telemetry is None:
            return 0.0
        seconds = (self.ended_at or time.monotonic()) - self.admitted_at
        return self.telemetry.emitted / max(seconds, 1e-9)

    # By the owner

    def _push(self, steps: list[Step]) -> None:
        for step in steps:
            self._items.put(self._read(step))

    def _close(self, finish: str, error: BaseException | None = None) -> None:
        self.ended_at = time.monotonic()
        self.finish = finish
        if isinstance(error, StopIteration):  # would look like the end
            error = RuntimeError(f"A request's own code raised {error!r}.")
        self._items.put(_End(finish, error))


def _token(step: Step) -> int:
    return step.token


class _Budget:
    """``admit`` by a memory policy: the batch as it is once every row is at its limit.

    All slots have the room of the longest row.
    """

    def __init__(self, policy: MemoryPolicy, batch: BatchIterator):
        self.policy, self.batch = policy, batch
        self.footprint = Footprint(batch.decoder.target, batch.decoder.drafter)
        self.capacity = 0

    def __call__(self, prompt: int, max_tokens: int, rows: int) -> bool:
        width = self.batch.width
        own = prompt + (MAX_RESERVED if max_tokens < 0 else max_tokens) + 2 * width
        capacity = max(bucket(own), self.batch.capacity, self.capacity if rows else 0)
        slots = max(self.batch.slots, 1 << rows.bit_length())  # a power of two
        if not rows_fit(self.policy, self.footprint, capacity, width - 1, slots):
            return False
        self.capacity = capacity
        return True


_STARTED: WeakSet[Scheduler] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is inside MLX when the interpreter goes would abort the program."""
    for scheduler in list(_STARTED):
        scheduler.close()


class Scheduler:
    """A bounded queue in front of a ``BatchIterator``, for embedders and servers.

    Its own thread makes the batch and is the only one that touches it; everything
    public may be called from any thread. Requests of different clients are admitted in
    turns, those of one client in order. What nobody has read yet is kept, at most
    ``max_tokens`` of each request. The end of the program closes it.

    Args:
        decoder (SpeculativeDecoder): Decodes; nobody else should use it meanwhile.
        max_rows (int): Requests that run at a time.
        max_waiting (int): Requests that wait at a time.
        admit (callable or MemoryPolicy, optional): ``admit(prompt_tokens, max_tokens,
            rows)`` says whether one more fits beside ``rows`` others; cached tokens
            count as prompt. False makes it wait, an error ends it. A ``MemoryPolicy``
            lets requests wait until they fit with their ``max_tokens``, whatever its
            action, unless that is ``"allow"``.
        prefill_step_size (int): As in ``BatchIterator``.

    Example:
        >>> with Scheduler(decoder) as scheduler:
        ...     for token in scheduler.submit(prompt, max_tokens=100):
        ...         print(token)
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        max_rows: int = 32,
        max_waiting: int = 256,
        admit: Admit | MemoryPolicy | None = None,
        prefill_step_size: int = 512,
    ):
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be positive but is {max_waiting}.")
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self._admit = admit or (lambda prompt, tokens, rows: True)
        self._make = lambda: BatchIterator(
            decoder, max_rows=max_rows, prefill_step_size=prefill_step_size
        )
        self._lock = threading.Condition()
        self._waiting: dict[Hashable, deque[Handle]] = {}  # by client, in turn
        self._running: dict[int, Handle] = {}
        self._cancelled: set[Handle] = set()
        self._closing: str | None = None
        self._failure: BaseException | None = None
        self._counts = dict.fromkeys(("stop", "length", "cancelled", "error"), 0)
        self._tokens, self._drafted, self._accepted = 0, 0, 0
        self._rounds = self._row_rounds = 0
        self._busy = 0.0
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlx-mtp", daemon=True)
        _STARTED.add(self)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def submit(
        self,
        prompt,
        *,
        client: Hashable = None,
        read: Callable[[Step], Any] = _token,
        timeout: float | None = 0,
        **options,
    ) -> Handle:
        """Queues a request.

        Args:
            prompt: ``(P,)`` token ids, or a ``VisionPrompt``.
            client: Whose it is; clients take turns.
            read (callable): What the handle gives of each step, called by the owner's
                thread, where its arrays may be used. Default: the token. What it
                raises ends the request.
            timeout (float, optional): Seconds to wait for a place in the queue. None is
                for ever.
            options: As in ``BatchIterator.add``. Callbacks run in the owner's thread.

        Raises:
            QueueFull: There was no place.
            SchedulerClosed: It is closed or has failed.
        """
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()  # lazy arrays belong to their thread
        handle = Handle(self, prompt, options, read, client)
        with self._lock:
            self._lock.wait_for(
                lambda: self._closing or self._queued < self.max_waiting, timeout
            )
            if self._closing:
                raise SchedulerClosed("The scheduler is closed.") from self._failure
            if self._queued >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests wait already.")
            self._waiting.setdefault(client, deque()).append(handle)
            self._lock.notify_all()
        return handle

    def metrics(self) -> dict:
        """What it does and has done, as plain values.

        ``tokens_per_second`` is over the time in which anything ran, ``rows`` has the
        running requests with their own, ``batch_width`` is the mean of all rounds.
        """
        with self._lock:
            rows = list(self._running.values())
            telemetry = [r.telemetry for r in rows]
            drafted = self._drafted + sum(t.drafted for t in telemetry)
            accepted = self._accepted + sum(t.accepted for t in telemetry)
            tokens = self._tokens + sum(t.emitted for t in telemetry)
            return {
                "waiting": self._queued,
                "running": len(rows),
                "ended": dict(self._counts),
                "tokens": tokens,
                "tokens_per_second": tokens / self._busy if self._busy else 0.0,
                "acceptance_rate": accepted / drafted if drafted else 0.0,
                "rounds": self._rounds,
                "batch_width": self._row_rounds / max(self._rounds, 1),
                "rows": [
                    {
                        "client": r.client,
                        "tokens": r.telemetry.emitted,
                        "tokens_per_second": r.tokens_per_second,
                        "acceptance_rate": r.telemetry.acceptance_rate,
                    }
                    for r in rows
                ],
            }

    def close(self, *, drain: bool = False) -> None:
        """Takes no more requests and ends the thread.

        Args:
            drain (bool): Whether the requests that are there are decoded first;
                otherwise they are cancelled.
        """
        with self._lock:
            self._closing = self._closing or ("drain" if drain else "cancel")
            if not drain:
                self._closing = "cancel"
            self._lock.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.close(drain=kind is None)

    @property
    def _queued(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _cancel(self, handle: Handle) -> None:
        with self._lock:
            if handle.finish is None:
                self._cancelled.add(handle)
                self._lock.notify_all()

    # The owner's thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._failure = error
        finally:
            with self._lock:
                self._closing = "cancel"
                self._end_all()
                self._lock.notify_all()
            self._started.set()
            # A compiled function that outlives the streams of its thread ends the
            # program with an abort.
            with suppress(Exception):
                mx.synchronize()
            mx.clear_streams()

    def _loop(self) -> None:
        batch = self._make()
        if isinstance(self._admit, MemoryPolicy):
            self._admit = _Budget(self._admit, batch)
        self._started.set()
        try:
            while self._wait():
                begin = time.perf_counter()
                self._turn(batch)
                self._busy += time.perf_counter() - begin
        finally:
            batch.close()

    def _wait(self) -> bool:
        """Waits for something to do; False when there never will be."""
        with self._lock:
            self._lock.wait_for(
                lambda: (
                    self._running or self._waiting or self._cancelled or self._closing
                )
            )
            if self._closing == "cancel":
                return False
            return bool(self._running or self._waiting or not self._closing)

    def _turn(self, batch: BatchIterator) -> None:
        self._drop(batch)
        for handle in self._next_requests():
            self._start(batch, handle)
        for out in next(batch, []):
            self._deliver(batch, out)
        with self._lock:
            self._rounds, self._row_rounds = batch.rounds, batch.row_rounds

    def _drop(self, batch: BatchIterator) -> None:
        """Ends what was cancelled."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        ids = {handle: id_ for id_, handle in self._running.items()}
        for handle in cancelled:
            if handle in ids:
                self._remove(batch, ids[handle], "cancelled")
            elif self._unqueue(handle):
                self._count(handle, "cancelled")

    def _next_requests(self) -> Iterator[Handle]:
        """Those that may start now, clients in turn; they leave the queue."""
        while len(self._running) < self.max_rows:
            with self._lock:
                handle = next((q[0] for q in self._waiting.values()), None)
            if handle is None:
                return
            try:
                fits = self._fits(handle)
            except Exception as error:
                self._unqueue(handle)
                self._count(handle, "error", error)
                continue
            if not fits:
                return
            self._unqueue(handle)
            yield handle

    def _fits(self, handle: Handle) -> bool:
        rows = len(self._running)
        limit = handle.options.get("max_tokens", 256)
        cached = cached_tokens(handle.options.get("caches") or ()) or 0
        size = cached + len(handle.prompt)
        if self._admit(size, limit, rows):
            return True
        if not rows:
            raise RequestRefused(
                f"The memory policy refuses a context of {size} tokens with max_tokens "
                f"{limit} though nothing else runs."
            )
        return False

    def _unqueue(self, handle: Handle) -> bool:
        """Takes a request out of the queue; its client goes behind the others."""
        with self._lock:
            queue = self._waiting.get(handle.client, ())
            if handle not in queue:
                return False
            queue.remove(handle)
            del self._waiting[handle.client]
            if queue:
                self._waiting[handle.client] = queue
            self._lock.notify_all()
            return True

    def _start(self, batch: BatchIterator, handle: Handle) -> None:
        try:
            id_ = batch.add(handle.prompt, **handle.options)
        except Exception as error:
            self._count(handle, "error", error)
            return
        with self._lock:
            handle.admitted_at = time.monotonic()
            handle.telemetry = batch.telemetry(id_)
            self._running[id_] = handle

    def _deliver(self, batch: BatchIterator, out: BatchOutput) -> None:
        try:
            self._running[out.id]._push(out.steps)
        except Exception as error:
            self._remove(batch, out.id, "error", error)
            return
        if out.finish is not None:
            self._end(out.id, out.finish, out.error)

    def _remove(self, batch: BatchIterator, id_: int, finish: str, error=None) -> None:
        """Ends a request that may still be in the batch."""
        try:
            batch.remove(id_)
        except Exception as failure:
            finish, error = "error", error or failure
        self._end(id_, finish, error)

    def _end(self, id_: int, finish: str, error=None) -> None:
        with self._lock:
            handle = self._running.pop(id_)
            self._tokens += handle.telemetry.emitted
            self._drafted += handle.telemetry.drafted
            self._accepted += handle.telemetry.accepted
        self._count(handle, finish, error)

    def _count(self, handle: Handle, finish: str, error=None) -> None:
        with self._lock:
            self._counts[finish] += 1
        handle._close(finish, error)

    def _end_all(self) -> None:
        """Ends every request, with the failure if there is one."""
        finish = "cancelled" if self._failure is None else "error"
        for queue in list(self._waiting.values()):
            for handle in queue:
                self._count(handle, finish, self._failure)
        self._waiting.clear()
        for id_ in list(self._running):
            self._end(id_, finish, self._failure)
