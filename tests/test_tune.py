"""``mlx-mtp tune``: what it concludes, keeps, and refuses."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlx_mtp import tuning
from mlx_mtp.benchmark import Run
from mlx_mtp.cli import main, tune
from mlx_mtp.cli.options import check_files
from mlx_mtp.telemetry import Telemetry
from mlx_mtp.tuning import Measurement, judge, load_profile, save_profile

CASES = ("a", "b", "c")


def measured(by_depth, plain=(50.0,) * 6, acceptance=0.8, per_round=2.5):
    """Measurements with ``by_depth[d]`` times the speed of plain decoding."""
    out = []
    for case in CASES:
        for turn, tps in enumerate(plain):
            out.append(Measurement(0, case, turn, tps, round_seconds=1 / tps))
            for depth, ratio in by_depth.items():
                wobble = 1 + 0.02 * ((turn + len(case)) % 3 - 1)
                speed = tps * ratio * wobble
                run = depth, case, turn, speed, per_round, acceptance
                out.append(Measurement(*run, per_round / speed))
    return out


def test_the_depth_that_pays_most_is_chosen_with_its_interval():
    verdict = judge(measured({1: 1.2, 2: 1.5, 4: 1.3}))
    assert verdict.depth == 2 and not verdict.warnings
    arm = verdict.arms[1]
    assert arm.low < arm.ratio < arm.high and arm.ratio == pytest.approx(1.5, rel=0.02)
    assert verdict.costs[0] == pytest.approx(1 / 50)
    assert verdict.costs[2] == pytest.approx(2.5 / 75, rel=0.03)


def test_no_depth_is_used_that_does_not_certainly_pay():
    verdict = judge(measured({1: 0.9, 3: 0.97}))
    assert verdict.depth == 0
    assert all("not certainly" in arm.refused for arm in verdict.arms)
    noisy = measured({2: 1.0})
    for i, m in enumerate(noisy):
        if m.depth:
            noisy[i] = replace(m, tps=50 * (3, 0.4)[m.turn % 2], acceptance=1)
    assert judge(noisy).depth == 0


def test_a_slow_baseline_does_not_make_a_depth_win():
    """Plain decoding fell from 80 to 40 while nothing was accepted at 44."""
    runs = []
    for case in CASES:
        for turn, plain in enumerate((80.0, 80.0, 40.0, 40.0)):
            runs.append(Measurement(0, case, turn, plain, round_seconds=1 / plain))
            runs.append(Measurement(2, case, turn, 44.0, 1.0, 0.0, 1 / 44))
    verdict = judge(runs)
    assert verdict.depth == 0 and verdict.arms[0].refused == "no draft was accepted"
    assert any("-50%" in warning for warning in verdict.warnings)


def test_more_speed_than_tokens_a_round_is_a_disturbed_measurement():
    verdict = judge(measured({2: 1.8}, per_round=1.5))
    assert verdict.depth == 0 and "disturbed" in verdict.arms[0].refused


def test_the_deepest_depth_is_reported_as_the_limit():
    (warning,) = judge(measured({1: 1.2, 4: 1.6})).warnings
    assert "4 is the deepest" in warning


def test_work_ahead_of_the_first_token_makes_no_depth_pay(demo):
    """As long as plain decoding from the request on, however much comes at first."""
    counts = Telemetry(rounds=4, drafted=8, accepted=5, round_tokens=9)
    arms = {
        0: lambda *_: Run(10, 1.0, 1.0, 0.1, 0),
        2: lambda *_: Run(10, 1.0, 1.0, 0.8, 0, counts),
    }
    args = SimpleNamespace(prompt=["Hi"], repeats=4, temperatures=[0.0], max_tokens=9)
    measurements = list(tune.measure(args, demo[1], arms))
    verdict = judge(measurements)
    (arm,) = verdict.arms
    assert arm.tps == verdict.plain_tps == 10 and arm.ratio == pytest.approx(1)
    assert "not certainly" in arm.refused and arm.tokens_per_round == 9 / 4
    assert verdict.costs == pytest.approx({0: 0.1, 2: 0.05})


@pytest.mark.parametrize("turn", [0, 3, 5])
def test_answers_of_one_token_say_nothing_about_rounds(turn):
    runs = [
        replace(m, tokens_per_round=0.0, acceptance=0.0, round_seconds=None)
        if m.turn == turn
        else m
        for m in measured({2: 1.5})
    ]
    verdict = judge(runs)
    assert verdict.depth == 2 and verdict.arms[0].tokens_per_round == 2.5
    without = [m for m in runs if m.depth or m.turn != turn]
    assert judge(without).depth == 2


def test_what_cannot_be_judged_is_refused():
    runs = measured({2: 1.5})
    with pytest.raises(ValueError, match=r"answers of plain decoding .* beside every"):
        judge([])
    with pytest.raises(ValueError, match="answers of plain decoding"):
        judge([m for m in runs if m.depth])
    with pytest.raises(ValueError, match=r"more than one token .* longer answers"):
        judge([replace(m, round_seconds=None) for m in runs])
    with pytest.raises(ValueError, match="depth 2 must have streams of the same case"):
        judge([m if m.depth else replace(m, case="other") for m in runs])


def test_a_verdict_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "deep" / "profile.json"
    assert load_profile(path) is None
    save_profile(path, judge(measured({2: 1.5})))
    assert load_profile(path)[0] == 2
    save_profile(path, judge(measured({2: 0.9})))
    depth, costs = load_profile(path)
    assert depth == 0 and set(costs) == {0, 2}
    for broken in ("", "[]", '{"depth": 1}', '{"depth": "x", "costs": {}}'):
        path.write_text(broken)
        assert load_profile(path) is None


def test_the_command_measures_and_generate_uses_the_profile(
    capsys, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "tune.json", tmp_path / "tune.png"
    args = "tune --depths 1 2 --temperatures 0 0.7 --prompt Hello! --repeats 1 -m 12"
    assert main([*args.split(), "--json", str(report), "--plot", str(picture)]) == 0
    found = json.loads(report.read_text())
    assert {m["depth"] for m in found["measurements"]} == {0, 1, 2}
    assert picture.stat().st_size > 1000
    assert "depth 2:" in capsys.readouterr().out
    path = tuning.profile_path("demo", "mtp")
    assert load_profile(path)[0] == found["verdict"]["depth"]

    generate = ["generate", "-p", "Hello!", "--json", "-m", "20"]
    for profile, options, depths in (
        (2, [], {"2"}),
        (0, [], None),
        (2, ["--depth", "1"], {"1"}),
        (2, ["--depth", "adaptive"], set("12345678")),  # plain is known: no 0
    ):
        costs = {"0": 1, "1": 1.1, "2": 1.2}
        path.write_text(json.dumps({"depth": profile, "costs": costs}))
        assert main([*generate, *options]) == 0
        mtp = json.loads(capsys.readouterr().out)["mtp"]
        if depths is None:
            assert mtp is None
        else:
            assert set(mtp["depths"]) <= depths, options


def test_a_draft_vocabulary_is_measured_as_another_drafter(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    options = "--draft-vocabulary 400 --depths 1 --repeats 1 -m 6 --prompt Hello"
    assert main(["tune", *options.split()]) == 0
    (path,) = tmp_path.iterdir()
    assert path == tuning.profile_path("demo", "mtp, 400 tokens")
    assert path != tuning.profile_path("demo", "mtp")


@pytest.mark.parametrize("command", ["tune", "bench"])
@pytest.mark.parametrize(
    "bad",
    [
        *("--repeats 0", "--depths 1 0", "--depths 33", "-m 1"),
        *("--temperatures 0 -1", "--temperatures nan", "--json no/folder/x.json"),
        *("--plot no/folder/x.png", "--plot /", "--plot x.doc"),
    ],
)
def test_bad_settings_are_refused_before_a_model_is_loaded(
    command, bad, capsys, monkeypatch
):
    if "plot" in bad:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(f"mlx_mtp.cli.{command}.load", None)
    assert main([command, *bad.split()]) == 2
    said = capsys.readouterr().err
    wrong = ("must be", "must end in", "No such file", "Is a directory")
    assert any(words in said for words in wrong), said


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path):
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("text")
    check_files(kept, new, None)
    assert kept.read_text() == "text" and not new.exists()


def test_the_profile_is_kept_although_a_report_fails(demo, tmp_path, monkeypatch):
    """The picture breaks at the end, as on a full disk."""
    pytest.importorskip("matplotlib")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tune, "plot", full)
    monkeypatch.setattr(tune, "measure", lambda *_: measured({1: 1.5}))
    picture = str(tmp_path / "depths.png")
    assert main(["tune", "--depths", "1", "--plot", picture]) == 2
    assert load_profile(tuning.profile_path("demo", "mtp"))[0] == 1


def test_a_profile_that_cannot_be_kept_is_refused_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "file" / "profiles")
    monkeypatch.setattr(tune, "measure", None)
    assert main(["tune", "--depths", "1"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
