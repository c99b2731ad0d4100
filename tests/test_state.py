"""Leaves, views and buckets: the parts that hold a stream's state."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_mtp.context import bucket
from mlx_mtp.sampling import split_keys, stream_key, uniforms
from mlx_mtp.state import (
    KV_ADAPTERS,
    KVAdapter,
    KVView,
    UnsupportedCache,
    classify,
)


def test_buckets_are_a_power_of_two_and_one_and_a_half_of_it():
    sizes = sorted({bucket(n) for n in range(1, 5000)})
    assert sizes == [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]


@given(st.integers(0, 10**7))
def test_a_bucket_holds_its_length_and_wastes_at_most_half(length):
    size = bucket(length)
    assert size == 256 or length <= size < 1.5 * length + 1


def test_every_cache_of_mlx_lm_has_an_adapter():
    """Each of them is in a test of test_caches.py, which this one reminds of."""
    classes = {name for name, x in vars(cache).items() if isinstance(x, type)}
    classes = {n for n in classes if issubclass(getattr(cache, n), cache._BaseCache)}
    assert classes - {"_BaseCache"} == {*KV_ADAPTERS, "ArraysCache", "CacheList"}


def rows(seed, length, batch=1):
    return mx.random.normal((batch, 2, length, 8), key=mx.random.key(seed))


@pytest.mark.parametrize("offset", [0, 1, 7, 255, 256, 300])
def test_a_cache_survives_adoption_and_release(offset):
    """With its slots grown in between, and plain writes continue behind them."""
    cache, twin, adapter = KVCache(), KVCache(), KVAdapter()
    for entry in (cache, twin):
        entry.update_and_fetch(rows(0, offset + 1), rows(1, offset + 1))
    leaves = adapter.adopt(cache, 4, 512)
    adapter.clear(cache)
    assert cache.empty() and cache.offset == 0
    assert {x.shape[2] for x in leaves} == {512}
    leaves = adapter.grow(leaves, 768)
    adapter.release(cache, leaves, offset + 1, mx.array([0]))
    for entry in (cache, twin):
        entry.update_and_fetch(rows(2, 3), rows(3, 3))
    assert cache.offset == twin.offset
    for x, y in zip(cache.keys_and_values(), twin.keys_and_values(), strict=True):
        assert mx.array_equal(x, y)


def test_a_view_writes_and_masks_each_row_at_its_own_offset():
    """Rows of one batch equal plain caches that were fed alone."""
    lengths, width, slots = [0, 5, 9], 3, 32
    caches = []
    for i, length in enumerate(lengths):
        cache = KVCache()
        cache.update_and_fetch(rows(i, max(length, 1)), rows(i, max(length, 1)))
        cache.offset = length
        caches.append(cache)
    keys = mx.concatenate([cache.keys[:, :, :slots] for cache in caches])
    view = KVView(keys, keys, mx.array(lengths), slots)
    new, queries = rows(7, width, 3), rows(8, width, 3)
    mask = view.make_mask(width)
    assert mask.shape == (3, 1, width, slots)
    k, v = view.update_and_fetch(new, new)
    out = mx.fast.scaled_dot_product_attention(queries, k, v, scale=1.0, mask=mask)
    for i, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        mask = create_attention_mask(rows(0, width)[:, 0], cache)
        k, v = cache.update_and_fetch(new[i : i + 1], new[i : i + 1])
        assert k.shape[2] == length + width
        plain = mx.fast.scaled_dot_product_attention(
            queries[i : i + 1], k, v, scale=1.0, mask=mask
        )
        assert mx.allclose(out[i], plain[0], atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_a_mask_of_a_host_offset_is_that_of_a_device_offset(window):
    for offset in (0, 3, 12):
        host = KVView(None, None, offset, 16).make_mask(4, window_size=window)
        device = KVView(None, None, mx.array([offset]), 16)
        device = device.make_mask(4, window_size=window)
        assert mx.array_equal(host, device[0, 0])
        seen = [[j for j in range(16) if row[j]] for row in host.tolist()]
        first = [max(offset + i + 1 - (window or 16), 0) for i in range(4)]
        assert seen == [[*range(f, offset + i + 1)] for i, f in enumerate(first)]


def test_every_entry_is_classified_before_any_is_touched():
    good, bad = KVCache(), ArraysCache(2)
    good.update_and_fetch(rows(0, 3), rows(1, 3))
    keys = good.keys
    with pytest.raises(UnsupportedCache, match="entry 1 is a ArraysCache"):
        classify([good, bad], [KVAdapter(), KVAdapter()])
    with pytest.raises(ValueError, match="has 1 entries"):
        classify([good], [KVAdapter(), KVAdapter()])
    assert good.keys is keys and good.offset == 3


# Random numbers


def test_uniforms_depend_on_the_rows_own_key_alone():
    keys = mx.random.split(mx.random.key(4), 6)
    draws = uniforms(keys, 9)
    assert draws.shape == (6, 9) and draws.dtype == mx.float32
    assert mx.all((draws >= 0) & (draws < 1)).item()
    assert len(set(draws.flatten().tolist())) == 54
    order = mx.array([3, 0, 5])
    assert mx.array_equal(uniforms(keys[order], 9), draws[order])
    assert mx.array_equal(uniforms(keys[2:3], 9), draws[2:3])


def test_a_split_gives_new_keys_for_now_and_later():
    keys = stream_key(7)
    seen = {tuple(keys[0].tolist())}
    for i in range(1, 50):
        keys, now = split_keys(keys)
        seen |= {tuple(keys[0].tolist()), tuple(now[0].tolist())}
        assert len(seen) == 2 * i + 1
    assert stream_key(7).shape == (1, 2) and stream_key(7).dtype == mx.uint32
