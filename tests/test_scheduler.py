"""Requests from many threads: none lost, none mixed up."""

import gc
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import mlx.core as mx
import pytest
from batch_soak import soak
from batches import prompt
from test_batch import Breaks
from tiny import random_prompt

from mlx_mtp.batch import BatchIterator
from mlx_mtp.drafters import NGramDrafter
from mlx_mtp.memory import Footprint, MemoryPolicy, rows_fit
from mlx_mtp.scheduler import (
    QueueFull,
    RequestRefused,
    Scheduler,
    SchedulerClosed,
)
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target


@pytest.fixture(scope="module")
def decoder(llama):
    return SpeculativeDecoder(as_target(llama), NGramDrafter(), 2)


@pytest.fixture(scope="module")
def truth(decoder):
    return [
        [step.token for step in decoder.stream(prompt(i, 128), max_tokens=30)]
        for i in range(6)
    ]


def test_many_threads_get_their_own_tokens(decoder, truth):
    found = {}

    def ask(i):
        rows = scheduler.submit(prompt(i, 128), max_tokens=30, client=i % 2)
        found[i] = list(rows), rows.finish

    with Scheduler(decoder, max_rows=4) as scheduler:
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = scheduler.metrics()
    assert [found[i] for i in range(6)] == [(tokens, "length") for tokens in truth]
    assert metrics["ended"]["length"] == 6 and metrics["tokens"] == 180
    assert metrics["waiting"] == metrics["running"] == 0
    assert 1 <= metrics["batch_width"] <= 4 and metrics["rounds"] > 0
    assert metrics["tokens_per_second"] > 0 < metrics["acceptance_rate"] < 1


def test_a_prompt_cache_comes_back_in_the_scheduler_and_out_of_it(decoder):
    def ask(stream, caches, i):
        options = {"caches": caches, "max_tokens": 9}
        items = stream(prompt(i, 128), **options)
        return [getattr(item, "token", item) for item in items]

    kept = [decoder.target.make_cache() for _ in range(2)]
    wanted = [ask(decoder.stream, kept[0], i) for i in range(3)]
    assert ask(decoder.stream, kept[1], 0) == wanted[0]
    with Scheduler(decoder) as scheduler:
        assert ask(scheduler.submit, kept[1], 1) == wanted[1]
    assert ask(decoder.stream, kept[1], 2) == wanted[2]


def test_read_is_called_where_the_arrays_live(decoder, truth):
    def read(step):
        return step.token, step.logprobs[step.token].item(), step.from_draft

    with Scheduler(decoder) as scheduler:
        handle = scheduler.submit(mx.array(prompt(1, 128)), max_tokens=30, read=read)
        items = list(handle)
        rates = handle.tokens_per_second
    assert [token for token, *_ in items] == truth[1]
    assert all(logprob <= 0 for _, logprob, _ in items) and rates > 0


class Gate:
    """Holds the owner's thread in a request's first prompt piece."""

    def __init__(self, scheduler):
        self.open, self.reached = threading.Event(), threading.Event()
        self.handle = scheduler.submit(
            prompt(0, 128), max_tokens=4, progress=self.progress
        )
        assert self.reached.wait(10)

    def progress(self, done, total):
        self.reached.set()
        self.open.wait(10)


def test_a_full_queue_pushes_back(decoder, truth):
    with Scheduler(decoder, max_rows=1, max_waiting=2) as scheduler:
        gate = Gate(scheduler)
        waiting = [scheduler.submit(prompt(i, 128), max_tokens=30) for i in (1, 2)]
        for timeout in (0, 0.01):
            with pytest.raises(QueueFull, match="2 requests wait"):
                scheduler.submit(prompt(3, 128), timeout=timeout)
        assert scheduler.metrics()["waiting"] == 2
        opener = threading.Timer(0.05, gate.open.set)
        opener.start()
        late = scheduler.submit(prompt(3, 128), max_tokens=30, timeout=None)
        assert [list(handle) for handle in (*waiting, late)] == truth[1:4]


def test_clients_take_turns(decoder):
    """A client with many requests does not keep another one waiting."""
    with Scheduler(decoder, max_rows=1) as scheduler:
        gate = Gate(scheduler)
        handles = {
            name: scheduler.submit(prompt(1, 128), max_tokens=2, client=name[0])
            for name in ("a1", "a2", "a3", "b1", "b2", "c1")
        }
        gate.open.set()
        for handle in handles.values():
            list(handle)
    order = sorted(handles, key=lambda name: handles[name].admitted_at)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_cancel_before_during_and_after(decoder, truth):
    with Scheduler(decoder, max_rows=1) as scheduler:
        gate = Gate(scheduler)
        waits = scheduler.submit(prompt(1, 128), max_tokens=30)
        runs = scheduler.submit(prompt(2, 128), max_tokens=2000)
        last = scheduler.submit(prompt(3, 128), max_tokens=30)
        waits.cancel()
        gate.open.set()
        assert list(waits) == [] and waits.finish == "cancelled"
        begin = list(islice(runs, 5))
        runs.cancel()
        runs.cancel()
        found = begin + list(runs)
        assert found[:30] == truth[2][: len(found)]
        assert len(found) < 2000 and runs.finish == "cancelled"
        assert list(last) == truth[3]
        last.cancel()
        assert last.finish == "length" and list(last) == []
        ended = scheduler.metrics()["ended"]
    assert ended == {"stop": 0, "length": 2, "cancelled": 2, "error": 0}


def test_an_error_ends_its_request_alone(decoder, truth):
    with Scheduler(decoder) as scheduler:
        bad = [
            scheduler.submit(prompt(1, 128), processors=[Breaks(3)]),
            scheduler.submit([]),
            scheduler.submit([10**6]),
            scheduler.submit(prompt(1, 128), colour="red"),
        ]
        good = scheduler.submit(prompt(2, 128), max_tokens=30)
        errors = (ZeroDivisionError, ValueError, ValueError, TypeError)
        for handle, error in zip(bad, errors, strict=True):
            with pytest.raises(error):
                list(handle)
            assert handle.finish == "error" and list(handle) == []
        assert list(good) == truth[2]


def test_a_read_that_fails_ends_its_request_alone(decoder, truth):
    read = {17: 0}.__getitem__  # no other token can be read
    stop = iter(()).__next__  # must not look like the end
    with Scheduler(decoder) as scheduler:
        handles = [
            scheduler.submit(prompt(1, 128), max_tokens=30, read=lambda step: 1 / 0),
            scheduler.submit(prompt(1, 128), max_tokens=1, read=read),
            scheduler.submit(prompt(1, 128), max_tokens=9, read=lambda step: stop()),
        ]
        good = scheduler.submit(prompt(2, 128), max_tokens=30)
        errors = (ZeroDivisionError, KeyError, RuntimeError)
        for handle, error in zip(handles, errors, strict=True):
            with pytest.raises(error):
                list(handle)
            assert handle.finish == "error"
        assert list(good) == truth[2]
        assert scheduler.metrics()["ended"]["error"] == 3
        assert list(scheduler.submit(prompt(3, 128), max_tokens=30)) == truth[3]


def test_a_cancelled_row_that_cannot_leave_ends_alone(decoder, truth, monkeypatch):
    taken, take = [], BatchIterator.take

    def fails_once(*args):
        taken.append(args)
        return take(*args) if len(taken) > 1 else 1 / 0

    with Scheduler(decoder) as scheduler:
        caches = decoder.target.make_cache()
        handle = scheduler.submit(prompt(1, 128), max_tokens=2000, caches=caches)
        found = list(islice(handle, 5))
        monkeypatch.setattr(BatchIterator, "take", fails_once)
        handle.cancel()
        with pytest.raises(ZeroDivisionError):
            found.extend(handle)
        assert handle.finish == "error" and len(taken) == 2
        assert caches[0].offset == len(prompt(1, 128)) + len(found)
        assert list(scheduler.submit(prompt(2, 128), max_tokens=30)) == truth[2]


def test_the_memory_policy_is_asked_before_a_row_is_admitted(decoder, truth):
    asked = []

    def admit(size, limit, rows):
        asked.append((size, limit, rows))
        if limit == 77:
            raise MemoryError("never")
        return rows < 2 and limit < 1000

    with Scheduler(decoder, admit=admit) as scheduler:
        handles = [scheduler.submit(prompt(i, 128), max_tokens=30) for i in range(4)]
        failing = scheduler.submit([1], max_tokens=77)
        large = scheduler.submit([1, 2], max_tokens=1000)
        assert [list(handle) for handle in handles] == truth[:4]
        with pytest.raises(MemoryError, match="never"):
            list(failing)
        with pytest.raises(RequestRefused, match="context of 2 tokens"):
            list(large)
        assert scheduler.metrics()["batch_width"] <= 2
    assert (len(prompt(0, 128)), 30, 0) == asked[0]
    assert max(rows for *_, rows in asked) == 2


def test_a_memory_policy_lets_requests_wait_until_they_fit(decoder, truth, monkeypatch):
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    footprint = Footprint(decoder.target, decoder.drafter)
    row = footprint.plan(256, 2).total - footprint.weights
    budget, asked = footprint.weights + 2 * row, set()

    def fits(*args):
        asked.add((args[-1], rows_fit(*args)))
        return rows_fit(*args)

    monkeypatch.setattr("mlx_mtp.scheduler.rows_fit", fits)
    with Scheduler(decoder, admit=MemoryPolicy(budget)) as scheduler:
        handles = [scheduler.submit(prompt(i, 128), max_tokens=30) for i in range(6)]
        large = scheduler.submit(prompt(0, 128), max_tokens=900)
        assert [list(handle) for handle in handles] == truth[:6]
        with pytest.raises(RequestRefused, match="max_tokens 900"):
            list(large)
    assert asked - {(2, False)} == {(1, True), (2, True), (4, False), (1, False)}
    with Scheduler(decoder, admit=MemoryPolicy(0, "allow")) as scheduler:
        assert list(scheduler.submit(prompt(0, 128), max_tokens=30)) == truth[0]


def test_rows_that_grow_stay_in_the_budget(decoder, monkeypatch):
    for module in ("scheduler", "context"):  # what a row reserves at its start
        monkeypatch.setattr(f"mlx_mtp.{module}.MAX_RESERVED", 16)
    caches = decoder.target.make_cache()
    decoder.feed(random_prompt(100, 128, 9), caches)
    footprint = Footprint(decoder.target, decoder.drafter)
    row = footprint.plan(512, 2).total - footprint.weights
    del footprint
    gc.collect()
    budget = mx.get_active_memory() + 7 * row
    mx.reset_peak_memory()
    with Scheduler(decoder, admit=MemoryPolicy(budget)) as scheduler:
        options = [{"caches": caches}, *[{}] * 5]
        handles = [
            scheduler.submit(random_prompt(20, 128, i), max_tokens=300, **more)
            for i, more in enumerate(options)
        ]
        assert [len(list(handle)) for handle in handles] == [300] * 6
        assert 2 < scheduler.metrics()["batch_width"] <= 4  # of eight slots if more
    assert caches[0].offset == 420
    # CUDA copies caches, which no plan counts: docs/cuda.md.
    assert mx.get_peak_memory() < budget or mx.default_device() != mx.cpu


def test_tokens_in_a_cache_are_told_to_the_policy(decoder):
    caches, asked = decoder.target.make_cache(), []
    decoder.feed([1, 2, 3], caches)

    def admit(*args):
        asked.append(args)
        return False

    with Scheduler(decoder, admit=admit) as scheduler:
        handle = scheduler.submit([4, 5], max_tokens=7, caches=caches)
        with pytest.raises(RequestRefused, match="context of 5 tokens"):
            list(handle)
    assert asked == [(5, 7, 0)]


def test_close_cancels_or_drains(decoder, truth):
    scheduler = Scheduler(decoder, max_rows=1)
    handles = [scheduler.submit(prompt(i, 128), max_tokens=30) for i in (1, 2)]
    scheduler.close(drain=True)
    assert [list(handle) for handle in handles] == truth[1:3]
    with pytest.raises(SchedulerClosed):
        scheduler.submit([1])
    scheduler = Scheduler(decoder, max_rows=1)
    handles = [scheduler.submit(prompt(i, 128), max_tokens=3000) for i in (1, 2)]
    scheduler.close()
    scheduler.close()
    for handle in handles:
        list(handle)
        assert handle.finish == "cancelled"


def test_a_failure_of_the_owner_reaches_everybody(decoder, monkeypatch):
    scheduler = Scheduler(decoder, max_rows=1)
    gate = Gate(scheduler)
    waiting = scheduler.submit(prompt(1, 128))
    monkeypatch.setattr("mlx_mtp.batch.BatchIterator._tidy", lambda self: 1 / 0)
    gate.open.set()
    for handle in (gate.handle, waiting):
        with pytest.raises(ZeroDivisionError):
            list(handle)
    with pytest.raises(SchedulerClosed) as caught:
        scheduler.submit([1])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_batch_that_cannot_be_made_is_told_at_once(decoder):
    with pytest.raises(ValueError, match="max_rows"):
        Scheduler(decoder, max_rows=0)
    with pytest.raises(ValueError, match="max_waiting"):
        Scheduler(decoder, max_waiting=0)


PROGRAM = """
from mlx_mtp import NGramDrafter, Scheduler, SpeculativeDecoder, as_target
from tiny import tiny_llama
decoder = SpeculativeDecoder(as_target(tiny_llama()), NGramDrafter(), 2)
"""
ENDS = {
    "closed": """
with Scheduler(decoder) as scheduler:
    list(scheduler.submit([1, 2, 3], max_tokens=20))
""",
    "running": """
scheduler = Scheduler(decoder)
next(scheduler.submit([1, 2, 3], max_tokens=20000))
""",
    "failed": """
def turn(batch):
    batch.add([1, 2, 3])
    next(batch)
    raise MemoryError
scheduler = Scheduler(decoder)
scheduler._turn = turn
try:
    next(scheduler.submit([1, 2, 3], max_tokens=20))
except MemoryError:
    pass
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_with_a_scheduler_ends_well(end):
    done = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}{ENDS[end]}print('end')"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_close_gives_the_callers_caches_back(decoder, truth):
    scheduler, caches = Scheduler(decoder), decoder.target.make_cache()
    handle = scheduler.submit(prompt(1, 128), max_tokens=3000, caches=caches)
    begin = list(islice(handle, 5))
    scheduler.close()
    tokens = begin + list(handle)
    assert caches[0].offset == len(prompt(1, 128)) + len(tokens)
    assert tokens[:30] == truth[1][: len(tokens)]


def test_hundreds_of_requests_with_cancels_stops_and_faults():
    ended, arrays, _ = soak(requests=300)
    assert sum(ended.values()) == 300 and min(ended.values()) > 5
    assert arrays < 2**16
