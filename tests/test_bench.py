"""``mlx-mtp bench``: the gate, the turns, the numbers, and who is measured."""

import json
import os
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest

from mlx_mtp.benchmark import PLAIN, Case, Joules, Run, arms, measure, peers, prompts
from mlx_mtp.benchmark.arms import Filters
from mlx_mtp.benchmark.report import markdown
from mlx_mtp.cli import main
from mlx_mtp.loading import find_model
from mlx_mtp.telemetry import Telemetry

# Stands in for the package mtplx: it counts up, and accepts half of its drafts.
MTPLX = {
    "__init__": "",
    "runtime": """
class Model:
    def set_dtype(self, dtype):
        self.dtype = str(dtype)
    def parameters(self):
        return []
class Runtime:
    model = Model()
def load(folder):
    print("a line that is no answer")
    return Runtime()
""",
    "sampling": """
def SamplerConfig(temperature, top_p, top_k):
    assert (top_p, top_k) == (0.9, 40)
    return temperature
""",
    "generation": """
import ctypes
import time
from types import SimpleNamespace
ctypes.CDLL("/usr/lib/libSystem.B.dylib").mach_absolute_time()
def generate_ar(runtime, prompt, *, max_tokens, stop_token_ids, token_callback, **_):
    assert runtime.model.dtype == "DTYPE" and 4087 in stop_token_ids
    tokens = list(range(max_tokens))
    time.sleep(0.05)  # ahead of the first token
    for token in tokens:
        token_callback(token)
    stats = SimpleNamespace(verify_calls=2, accepted_by_depth=[2, 1],
                            drafted_by_depth=[2, 2])
    return SimpleNamespace(tokens=tokens, stats=stats)
def generate_mtpk(*args, speculative_depth, verify_core, **options):
    assert speculative_depth == 2 and "tape" in verify_core or verify_core == "stock"
    return generate_ar(*args, **options)
""",
}


@pytest.fixture
def mtplx(tmp_path, monkeypatch):
    folder = tmp_path / "packages" / "mtplx"
    folder.mkdir(parents=True)
    # As the demo is loaded.
    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.float16
    for name, text in MTPLX.items():
        (folder / f"{name}.py").write_text(text.replace("DTYPE", str(dtype)))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)
    return sys.executable


def test_the_command_measures_every_arm_and_writes_the_reports(tmp_path, mtplx):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"speed.{ending}" for ending in ("json", "md", "png")]
    options = "--sets long --contexts 100 --depths 2 --temperatures 0.7"
    options += (
        f" --top-p 0.9 --top-k 40 --repeats 1 -m 8 --mtplx {mtplx} --draft-model demo"
    )
    for name, file in zip(("json", "markdown", "plot"), files, strict=True):
        options += f" --{name} {file}"
    assert main(["bench", *options.split()]) == 0
    report = json.loads(files[0].read_text())
    header, rows = report["header"], report["rows"]
    expected = [PLAIN, "depth 2", "draft model 2"]
    expected += ["mtplx plain", "mtplx 2"]
    assert [(r["prompt_set"], r["arm"]) for r in rows] == [
        (name, arm) for name in ("long 100",) for arm in expected
    ]
    assert "outputs of 8 tokens equal mlx_lm's" in header["notes"][0]
    # mlx_lm cannot roll back the recurrent layers of this model.
    assert any("The peer: mtplx " in note for note in header["notes"])
    assert any("mlx_lm's own draft model is not" in note for note in header["notes"])
    assert 80 < rows[-1]["prompt_tokens"] < 150
    deep = rows[1]
    assert len(deep["acceptance"]) == 2 and 1 <= deep["tokens_a_round"] <= 3
    assert deep["first_token_s"] > 0 and deep["peak_gb"] > 0 and deep["tps"] > 0
    peer = rows[4]
    assert 0.05 < peer["first_token_s"] and peer["tps"] < 8 / 0.05
    assert peer["acceptance"] == [1.0, 0.5] and peer["tokens_a_round"] == 2.5
    page = files[1].read_text()
    assert deep["rival"] == "mtplx 2" and "| mtplx 2: " in page
    assert page.count("| depth 2 |") == 1 and "50%" in page
    assert files[2].stat().st_size > 5000


def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in ("bench", "tune"):
        assert main([command, "--plot", "speed.png"]) == 2
        assert "needs matplotlib" in capsys.readouterr().err


def test_other_tokens_end_the_command(monkeypatch, capsys):
    def wrong(prompt, model, max_tokens):
        return ((0, None) for _ in range(max_tokens))

    monkeypatch.setattr("mlx_mtp.proof.checks.generate_step", wrong)
    options = "--prompt Hello! --depths 1 --temperatures 0 --repeats 1 -m 4"
    assert main(["bench", *options.split()]) == 1
    assert "1 differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad", ["--contexts 9 0", "--top-p 1.5", "--top-k -1", "--markdown no/folder/x.md"]
)
def test_bad_settings_are_refused_before_a_model_is_loaded(bad, capsys, monkeypatch):
    monkeypatch.setattr("mlx_mtp.cli.bench.load", None)
    assert main(["bench", *bad.split()]) == 2
    said = capsys.readouterr().err
    assert "must be" in said or "No such file" in said


def test_mtplx_that_is_missing_is_said_to_be():
    with pytest.raises(RuntimeError, match=r"mtplx has stopped: .*No module.*mtplx"):
        peers.MTPLX(sys.executable, find_model("demo"), "float32", Filters(), [0])


def test_arms_take_turns_and_only_pairs_are_compared():
    asked = []

    def arm(name, tps, mtp=None):
        def decode(prompt, temperature, max_tokens, seed):
            asked.append((seed, prompt[0], name))
            seconds = 100.0 if seed == 0 else max_tokens / (tps * seed)
            return Run(max_tokens, seconds, seconds / 2, 0.5, 2 * 10**9, mtp)

        return decode

    counts = Telemetry(rounds=4, round_tokens=10, reached_at=[4, 3], accepted_at=[3, 3])
    rows = measure(
        {PLAIN: arm("plain", 10), "depth 2": arm("ours", 25, counts)},
        [Case("a", [[1], [2]], 0.0), Case("b", [[3]], 1.0)],
        max_tokens=10,
        repeats=2,
        rivals={"depth 2": PLAIN},
    )
    plain, ours, *rest = list(rows)
    order = [(seed, name) for seed, prompt, name in asked if prompt == 1]
    assert order == [
        *((0, "plain"), (0, "ours"), (1, "ours")),
        *((1, "plain"), (2, "plain"), (2, "ours")),
    ]
    # The machine is twice as fast in the second turn; the ratio of pairs is the same.
    assert plain["tps"] == pytest.approx(15) and plain["spread"] > 0.5
    assert list(ours["ratio"].values()) == pytest.approx([2.5, 2.5, 2.5])
    assert ours["ratio_to_rival"] == ours["ratio"] and plain["rival"] is None
    assert plain["cpu_s_a_token"] == pytest.approx((1 / 20 + 1 / 10) / 4)
    assert ours["streams"] == 4 and ours["peak_gb"] == 2
    assert ours["tokens_a_round"] == 2.5 and ours["acceptance"] == [0.75, 1.0]
    assert plain["tokens_a_round"] is None
    assert [row["prompt_set"] for row in rest] == ["b", "b"]


def test_work_ahead_of_the_first_token_is_no_gain(monkeypatch):
    """Both loops take 10 s for 10 tokens; one does most of it ahead of the first."""
    clock = [0.0]

    def loop(at_the_call, first, later):
        def tokens():
            for i in range(10):
                clock[0] += later if i else first
                yield SimpleNamespace(mtp=None)

        def decode(*args, **options):
            clock[0] += at_the_call
            return tokens()

        return decode

    monkeypatch.setattr(arms, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(arms, "process_time", lambda: 2 * clock[0])
    monkeypatch.setattr(mlx_lm, "stream_generate", loop(0, 1.0, 1.0))
    monkeypatch.setattr(arms, "stream_generate", loop(3.0, 6.1, 0.1))
    model = None, None, Filters()
    runs = arms.plain(*model), arms.ours(*model, None)
    plain, ours = (arm([1], 0.0, 10, 0) for arm in runs)
    assert (plain.tps, plain.first, plain.cpu) == pytest.approx((1, 1, 20))
    assert (ours.tps, ours.first, ours.cpu) == pytest.approx((1, 9.1, 20))


def test_joules_count_all_packages_and_turns_of_a_counter(tmp_path):
    def domain(i, name, used):
        folder = tmp_path / f"intel-rapl:{i}"
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(name)
        (folder / "max_energy_range_uj").write_text("10000000")
        (folder / "energy_uj").write_text(str(used))

    domain(0, "package-0", 9_000_000)
    domain(1, "package-1", 1_000_000)
    domain(2, "dram", 0)
    joules = Joules(tmp_path)
    before = joules.read()
    domain(0, "package-0", 500_000)
    domain(1, "package-1", 3_000_000)
    domain(2, "dram", 7)
    assert joules.missing is None and joules.since(before) == 3.5


def test_joules_that_nobody_may_read_have_a_reason(tmp_path, monkeypatch):
    none = Joules(tmp_path)
    assert "no counter" in none.missing and none.since(none.read()) is None
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0" / "name").write_text("package-0")
    assert "no right" in Joules(tmp_path).missing
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "powermetrics" in Joules(tmp_path).missing


def test_reports_show_joules_where_there_are_some():
    row = {
        "prompt_set": "a",
        "prompt_tokens": 5,
        "temperature": 0.0,
        "arm": PLAIN,
        "tps": 10.0,
        "spread": 0.1,
        "ratio": {"mean": 1.0, "low": 1.0, "high": 1.0},
        "cpu_s_a_token": 0.0031,
        "first_token_s": 0.02,
        "peak_gb": 1.0,
        "rival": None,
        "ratio_to_rival": None,
        "joules_a_token": 0.256,
        "tokens_a_round": None,
        "acceptance": [],
    }
    header = {"model": "m", "versions": {}, "machine": {}, "notes": []}
    assert "| 3.10 ms | 20 ms | 0.26 | 1.00 |" in markdown(header, [row])


@pytest.mark.parametrize("tokens", [300, 3000])
def test_a_long_context_is_about_as_long_as_asked(demo, tokens):
    _, tokenizer = demo
    text = prompts.long_context(tokenizer.encode, tokens)
    assert 0.9 * tokens < len(tokenizer.encode(text)) < 1.15 * tokens
