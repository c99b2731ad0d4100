"""The host code of csrc/gpu, run on a fake device and the emulator."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import host
import mlx.core as mx
import nanobind
import numpy as np
import pytest

from mlx_mtp import ops

HERE = Path(__file__).parent
DEVICE = HERE / "device"
sys.path.append(str(DEVICE))

from fake_device import FakeDevice  # noqa: E402

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
OPS = ["sample", "verify_draft", "verify_coupled", "commit_rows", "gated_delta_replay"]
# Not run: bit equality is promised for the CPU path only; "allocates" counts what that
# path allocates; the next four draw too often for an emulator; "keeps_all_ties" draws
# at u = 0 past a token of probability 1e-19, less than the kernels resolve.
CPU_ONLY = [
    "bit_equal",
    "allocates",
    "follow",
    "filtered_draft_counts",
    "values_drawn_from",
    "temperature_holds",
    "keeps_all_ties",
]


def run(*command, **kwargs):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, **kwargs
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    """The extension with the fake device."""
    folder = tmp_path_factory.mktemp("device")
    run(
        *("cmake", "-S", DEVICE, "-B", folder),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_ROOT={nanobind.cmake_dir()}",
    )
    log = run("cmake", "--build", folder, "-j2")
    assert "warning" not in log
    return next(folder.glob("_ext.*"))


@pytest.fixture
def fake(extension, library):
    return FakeDevice(extension, library)


def calls(seed, dtype, V=700):
    """One call of every op with every kernel, as (op, arguments, options)."""
    rng = np.random.default_rng(seed)

    def array(*shape, dtype=mx.float32):
        return mx.array(rng.normal(0, 2, shape).astype(np.float32)).astype(dtype)

    def uniform(*shape):
        return mx.array(rng.random(shape).astype(np.float32))

    B, K, T, H, D = 2, 3, 4, 2, 6
    drafts = mx.array(rng.integers(0, V, (B, K)))
    verify = (array(B, T, V, dtype=dtype), drafts, array(B, K, V, dtype=dtype))
    coins = {"uniforms": uniform(B, K + 2)}
    seed = mx.array(rng.integers(0, 2**32, (B, 2), np.uint32))
    noise = {"seed": seed, "position": mx.array([5, 900])}
    keys = [array(B, T, H, D, dtype=dtype) for _ in range(3)]
    gates = [uniform(B, T, H), uniform(B, T, H).astype(dtype)]
    logits = (array(5, V, dtype=dtype), uniform(5, 2))
    replay = (array(B, H, D, D), *keys[:2], *gates, mx.array([0, 3]))
    return [
        ("sample", logits, {}),
        ("sample", logits, {"top_p": 0.9}),
        ("verify_draft", verify, coins),
        ("verify_draft", verify, {**coins, "top_k": 20}),
        ("verify_draft", verify[:2], coins),
        ("verify_draft", verify, {**coins, "logprobs": False, "temperature": 0.6}),
        ("verify_draft", verify, {**coins, "logprobs": False, "top_p": 0.9}),
        ("verify_coupled", verify[:2], noise),
        ("verify_coupled", verify[:2], {**noise, "min_p": 0.02}),
        ("gated_delta_replay", replay, {}),
        ("gated_delta_replay", (*replay, keys[2]), {}),
    ] + [
        ("commit_rows", (x, x[:, :, :2], mx.array([0, 1]), mx.array([1, 2])), {})
        for x in (array(B, H, T, d, dtype=dtype) for d in (1, 3, 4, 16))
    ]


def flat(result):
    return result if isinstance(result, tuple) else (result,)


def agree(got, want):
    """Equal integers, and floats as close as their type allows."""
    for x, y in zip(flat(got), flat(want), strict=True):
        assert x.dtype == y.dtype
        close = (
            4e-3 if y.dtype == mx.bfloat16 else 1e-3 if y.dtype == mx.float16 else 2e-5
        )
        x, y = (np.array(a.astype(mx.float32)) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=close, atol=close)


def signatures():
    """What every kernel of metal/ reads, writes and takes as constants."""
    found = {}
    for header in host.METAL.glob("*.h"):
        text = header.read_text()
        for name, body in re.findall(r"kernel void (\w+)\((.*?)\) \{", text, re.S):
            arguments = re.findall(r"(\w+) (\w+)\W[^[]*\[\[buffer\((\d+)\)", body)
            found[name] = (
                {int(i) for kind, _, i in arguments if kind == "const"},
                {int(i) for kind, _, i in arguments if kind == "device"},
                {
                    int(i): ctypes.sizeof(host.STRUCTS[struct])
                    for kind, struct, i in arguments
                    if kind == "constant"
                },
            )
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_binds_what_the_kernels_declare(fake, dtype):
    for op, args, options in calls(0, dtype):
        mx.eval(getattr(fake.ops, op)(*args, **options))
    declared, seen = signatures(), set()
    for dispatch in fake.dispatches():
        name = next(n for n in declared if dispatch.kernel.startswith(n))
        bound = (dispatch.reads, dispatch.writes, dispatch.constants)
        assert bound == declared[name], name
        seen.add(name)
    assert seen == set(declared)


@pytest.mark.parametrize("max_threads", [1024, 700, 100, 32])
def test_any_pipeline_limit_and_order_of_threads(fake, max_threads):
    fake.configure(max_threads, seed=max_threads)
    for dtype in DTYPES:
        for op, args, options in calls(1, dtype):
            got = getattr(fake.ops, op)(*args, **options)
            agree(got, getattr(ops, op)(*args, **options))
    threads = {dispatch.threads for dispatch in fake.dispatches()}
    assert max(threads) == min(max_threads // 32 * 32, 640)


def test_works_inside_a_lazy_graph_on_any_stream(fake):
    def chain(o, x, u):
        """Every op on inputs that are not computed yet, and used by more work."""
        logits = (x @ x.T)[None, :4] * 0.1
        tokens, stats = o.sample(logits[:, :3], u[:, :3, :2])
        out = o.verify_draft(
            logits, tokens, logits[:, :3] * 1, uniforms=u[:, 3], draft_stats=stats
        )
        kept = mx.maximum(out[1], 0)
        seed = (u[0, :1, :2] * 1000).astype(mx.uint32)
        out += o.verify_coupled(logits, tokens, seed=seed, position=kept)
        cache = o.commit_rows(x[None, None] * 1, x[None, None, 5:9] + 1, kept, kept)
        state = x[None, None, :8, :8]
        k, g = state.transpose(0, 2, 1, 3), x[None, :8, :1]
        return *out, cache, o.gated_delta_replay(state * 1, k, k, g, g, kept) * 2

    x = mx.random.uniform(shape=(60, 20), key=mx.random.key(1))
    u = mx.random.uniform(shape=(1, 4, 5), key=mx.random.key(2))
    want = chain(ops, x, u)
    agree(chain(fake.ops, x, u), want)
    agree(mx.compile(lambda x, u: chain(fake.ops, x, u))(x, u), want)
    with mx.stream(mx.new_stream(mx.cpu)):
        agree(chain(fake.ops, x * 1, u), want)


def test_the_embedded_vocabulary_of_a_large_model(fake):
    rng = np.random.default_rng(3)
    target = mx.array(rng.normal(0, 4, (1, 3, 248_320)).astype(np.float32))
    args = (target, mx.array([[7, 9]]), target[:, :2] * 0.9)
    u = {"uniforms": mx.array([[0.5, 0.5, 0.6, 0.7]])}
    for filters in ({}, {"top_p": 0.95}, {"top_k": 20}):
        got = fake.ops.verify_draft(*args, **u, draft_params=None, **filters)
        agree(got, ops.verify_draft(*args, **u, draft_params=None, **filters))


@pytest.mark.parametrize(("heads", "rows"), [(127, 1), (128, 2)])
def test_many_rows_share_their_keys(fake, heads, rows):
    k = mx.random.normal((1, 1, 1, 4))
    v, g = mx.random.normal((1, 1, heads, 128)), mx.full((1, 1, heads), 0.5)
    state = mx.random.normal((1, heads, 128, 4))
    args = state, k, v, g, g, mx.array([1])
    fake.dispatches()
    out = fake.ops.gated_delta_replay(*args)
    assert mx.allclose(out, ops.gated_delta_replay(*args), atol=1e-5).item()
    (dispatch,) = fake.dispatches()
    assert dispatch.kernel == f"gated_delta_replay_float32_128_{rows}"
    assert dispatch.grid == (16 // rows, heads, 1)


def test_refuses_more_key_dims_than_the_kernel_has_registers_for(fake):
    k, one = mx.zeros((1, 1, 1, 257)), mx.zeros((1, 1, 1))
    out = fake.ops.gated_delta_replay(
        mx.zeros((1, 1, 4, 257)), k, k[..., :4], one, one, mx.array([1])
    )
    with pytest.raises(RuntimeError, match="up to 256 but Dk is 257"):
        mx.eval(out)


@pytest.mark.parametrize("op", OPS)
def test_passes_the_tests_of_the_cpu_path(op, extension, library):
    """In a process where the fake device takes its place."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "plugin", "-x", "-n", "0"),
            *("--fake-device", extension, "--emulator", library),
            # Few threads are fewer fibers to switch between.
            *("--max-threads", "64"),
            *("-k", " and ".join(f"not {name}" for name in CPU_ONLY)),
            HERE.parent / f"test_{op}.py",
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"kernels: {op}" in done.stdout or f" {op}" in done.stdout


def environment():
    """Finds this file and the plugin. Memory that is read before it is written, or
    after it was freed, shows.
    """
    folders = [*map(str, (HERE, HERE / "emulator", DEVICE, HERE.parent))]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "MALLOC_PERTURB_": "165"}


def shows(fault, op, extension, library):
    """Raises if a fault in every dispatch changes a result of the calls of one op."""
    fake = FakeDevice(extension, library)
    fake.configure(max_threads=64, fault=fault)
    for name, args, options in calls(0, mx.float32):
        if name == op:
            got = getattr(fake.ops, op)(*args, **options)
            agree(got, getattr(ops, op)(*args, **options))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "fault", ["", "output as input", "swapped inputs", "wrong offset", "short grid"]
)
def test_a_wrong_host_is_seen(fault, op, extension, library):
    """In a process of its own: it may also crash."""
    call = f"test_fake_device.shows{(fault, op, str(extension), str(library))}"
    done = subprocess.run(
        [sys.executable, "-c", f"import test_fake_device; {call}"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == (fault != ""), done.stderr
