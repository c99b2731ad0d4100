"""``mlx-mtp verify``: it passes what is right and finds planted faults."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats
from tiny import random_head, random_prompt, tiny_llama, tiny_qwen

import mlx_mtp.round
from mlx_mtp.cli import main
from mlx_mtp.cli.options import chat_prompt
from mlx_mtp.cli.verify import PROMPTS, TEXT, lines
from mlx_mtp.drafters import MTPHeadDrafter, NGramDrafter
from mlx_mtp.proof import ALPHA, Report, Result, Size, Subject, statistics, verify
from mlx_mtp.proof.checks import enumerated, widths
from mlx_mtp.round import Round
from mlx_mtp.targets import as_target

VOCAB = 12
# MLX's CUDA backend rotates no more rows at once where so few of their values turn.
SMALL = Size(tokens=24, streams=1024, batch=64 if mx.cuda.is_available() else 256)


@pytest.fixture(scope="module")
def parts():
    """A hybrid whose rows are sharp, and a head that is often wrong."""
    config = {"vocab": VOCAB, "layers": 2, "hidden": 32}
    target = as_target(tiny_qwen(**config))
    target.text.lm_head.weight = 8 * target.text.lm_head.weight
    return target, random_head(target, **config)


def subject(target, drafter, depth=2):
    prompts = [random_prompt(n, VOCAB, n) for n in (4, 9)]
    return Subject(target, drafter, depth, prompts, random_prompt(6, VOCAB, 1))


def failed(report):
    return {result.name.split(",")[0] for result in report.results if not result.ok}


def test_right_streams_pass(parts):
    report = verify(subject(*parts), SMALL)
    assert report.ok, lines(report)
    assert report.adjusted and min(report.adjusted.values()) >= ALPHA
    names = {result.name.split(",")[0] for result in report.results}
    checks = ("greedy tokens", "block widths", "sampled", "enumerated", "acceptance")
    assert names == {*checks, "biased control"}
    assert all(0 < result.tv < 0.3 for result in report.results if result.tv)


def test_right_streams_of_copied_drafts_pass():
    report = verify(subject(as_target(tiny_llama(VOCAB)), NGramDrafter(), 1), SMALL)
    assert report.ok, lines(report)


def test_drafts_of_tokens_that_the_enumeration_leaves_out_pass(parts):
    target, drafter = parts
    drafter = MTPHeadDrafter(drafter.head, target, vocabulary=range(0, VOCAB, 2))
    results = enumerated(subject(target, drafter, 1), SMALL, lambda seeds, _: seeds)
    assert min(p for result in results for p in result.p_values.values()) > 1e-4


def test_a_forward_of_ours_that_is_not_the_models_is_found(parts):
    target, drafter = parts

    class Sharper(type(target)):
        def logits(self, hidden):
            return 1.3 * super().logits(hidden)

    target = Sharper(target.model)
    drafter = MTPHeadDrafter(drafter.head, target)
    report = verify(subject(target, drafter), SMALL)
    assert {"block widths", "sampled", "enumerated"} <= failed(report)


def test_a_plain_step_that_is_not_the_models_is_found(parts):
    target, drafter = parts

    class Rolled(type(target)):
        def step(self, tokens, caches):
            out = super().step(tokens, caches)
            return out._replace(logits=mx.roll(out.logits, 1, axis=-1))

    subject_ = subject(Rolled(target.model), drafter)
    (result,) = widths(subject_, SMALL, lambda seeds, _: seeds)
    assert not result.ok and "plain steps" in result.line


class UnfilteredQ(MTPHeadDrafter):
    """Forgets that its drafts were filtered."""

    def propose(self, state, context):
        drafts, state = super().propose(state, context)
        return drafts._replace(stats=None), state


class GreedyAsSampled(MTPHeadDrafter):
    """Proposes the argmax and says that it was drawn."""

    def propose(self, state, context):
        def draw(logits, i):
            _, reported = context.draw(logits, i)
            return mx.argmax(logits, axis=-1).astype(mx.int32), reported

        return super().propose(state, replace(context, draw=draw))


def shared_noise(monkeypatch):
    """The correction is drawn with the noise of the first draft."""
    uniforms = mlx_mtp.round.round_uniforms

    def shared(keys, depth):
        draws = uniforms(keys, depth)
        return mx.concatenate([draws[:, :-2], draws[:, :2]], axis=1)

    monkeypatch.setattr(mlx_mtp.round, "round_uniforms", shared)


def no_rollback(monkeypatch):
    """The recurrent state keeps the rejected drafts."""
    commit = Round.commit

    def keeps_all(self, verified, proposal, tokens, accepted):
        state, counts = commit(self, verified, proposal, tokens, accepted)
        if proposal.drafts[0].shape[1]:
            state["steps"] = mx.full(state["steps"].shape, self.width, mx.int32)
        return state, counts

    monkeypatch.setattr(Round, "commit", keeps_all)


def wrong_bonus_row(monkeypatch):
    """The bonus comes from the row in front of its own."""
    accept = Round.accept

    def shifted(self, state, proposal, logits):
        if logits.shape[1] > 1:
            logits = mx.concatenate([logits[:, :-1], logits[:, -2:-1]], axis=1)
        return accept(self, state, proposal, logits)

    monkeypatch.setattr(Round, "accept", shifted)


faults = pytest.mark.parametrize(
    ("fault", "found_by"),
    [
        (shared_noise, "enumerated"),
        (UnfilteredQ, "enumerated"),
        (GreedyAsSampled, "acceptance"),
        (no_rollback, "greedy tokens"),
        (wrong_bonus_row, "greedy tokens"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)


def plant(fault, target, drafter, monkeypatch):
    if isinstance(fault, type):
        return fault(drafter.head, target)
    fault(monkeypatch)
    return drafter


@faults
def test_a_planted_fault_is_found(parts, fault, found_by, monkeypatch):
    target, drafter = parts
    drafter = plant(fault, target, drafter, monkeypatch)
    report = verify(subject(target, drafter, 1), SMALL)
    assert found_by in failed(report), lines(report)


@pytest.mark.slow
@faults
def test_a_planted_fault_is_found_on_the_demo(demo_parts, fault, found_by, monkeypatch):
    tokenizer, target = demo_parts.tokenizer, demo_parts.target
    drafter = plant(fault, target, demo_parts.drafter, monkeypatch)
    prompts = [chat_prompt(tokenizer, prompt) for prompt in PROMPTS]
    text = tokenizer.encode(TEXT)
    report = verify(Subject(target, drafter, 1, prompts, text), Size(48, 512, 64))
    assert failed(report) - {"biased control"}, lines(report)


def test_too_few_streams_are_no_power_and_no_difference(parts):
    report = verify(subject(*parts), Size(tokens=4, streams=8, batch=8))
    assert failed(report) == {"biased control"}
    assert not (report.ok or report.differs or report.power)
    assert not any("DIFFERS" in line or "FAIL" in line for line in lines(report))
    assert lines(report)[-1].startswith("NO POWER")


@pytest.mark.parametrize("freedom", [1, 2, 7, 60, 400])
@pytest.mark.parametrize("factor", [0.2, 0.9, 1, 1.3, 4])
def test_chi_square_tails(freedom, factor):
    x = factor * freedom
    expected = stats.chi2.sf(x, freedom)
    assert statistics.chi2_sf(x, freedom) == pytest.approx(expected, rel=1e-9)


def test_two_samples_of_ids_and_of_numbers():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(40))
    a, b, c = rng.choice(40, 3000, p=p), rng.choice(40, 3000, p=p), rng.choice(40, 3000)
    assert statistics.two_sample(a, b)[0] > 0.01
    assert statistics.two_sample(a, c)[0] < 1e-9
    counts = np.array([np.bincount(x, minlength=3) for x in (a % 3, b % 3)])
    expected = stats.chi2_contingency(counts, correction=False)
    assert statistics.two_sample(a % 3, b % 3) == pytest.approx(
        (expected.pvalue, expected.dof)
    )
    x, y = rng.normal(size=500), rng.normal(0.2, size=700)
    expected = stats.ks_2samp(x, y, method="asymp").pvalue
    assert statistics.kolmogorov_smirnov(x, y) == pytest.approx(expected, rel=0.3)


def test_counts_against_probabilities():
    p = np.array([[0.5, 0.3], [0.2, 0.0]])
    counts = np.array([[480, 310], [210, 0]])
    expected = stats.chisquare([480, 310, 210], [500, 300, 200]).pvalue
    assert statistics.goodness(counts, p) == (pytest.approx(expected), 2)
    assert statistics.goodness(counts + np.eye(2), p)[0] == 0
    rare = np.array([0.998, 0.001, 0.001])
    assert statistics.goodness(np.array([1000, 0, 0]), rare) == (1.0, 0)


def test_accepted_drafts_against_their_chances():
    assert statistics.count_p(500, 500, 250, 1000) == 1
    assert statistics.count_p(1000, 999.5, 0.5, 1000) > 0.1
    assert statistics.count_p(990, 999.5, 0.5, 1000) < 1e-8
    assert statistics.count_p(3, 0, 0, 1000) == 0
    assert statistics.count_p(800, 750, 187.5, 1000) == pytest.approx(
        2 * stats.norm.sf(50 / 187.5**0.5)
    )


def test_holm_is_the_step_down_correction():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_the_stated_power_is_the_measured_one():
    cells, size = 50, 2000
    shift = statistics.detectable(cells - 1, ALPHA, size)
    p = np.full(cells, 1 / cells)
    q = p * np.where(np.arange(cells) % 2, 1 + 2 * shift, 1 - 2 * shift)
    rng = np.random.default_rng(1)
    found = [
        statistics.goodness(rng.multinomial(size, q), p)[0] < ALPHA for _ in range(500)
    ]
    assert 0.97 < np.mean(found) <= 1


def test_the_command_reports_and_its_exit_code_tells(capsys, tmp_path, monkeypatch):
    right, wrong = Result("a", True, "equal", {"t": 0.5}, 0.1), Result("b", False, "")
    weak = Result("c", False, "not found", control=True)
    for code, results in (
        (0, [right]),
        (1, [right, wrong]),
        (3, [right, weak]),
        (1, [right, wrong, weak]),
    ):
        report = Report(results, {"a: t": 0.5})
        monkeypatch.setattr("mlx_mtp.cli.verify.verify", lambda *_, r=report: r)
        path = tmp_path / "report.json"
        assert main(["verify", "--json", str(path)]) == code
        found = json.loads(path.read_text())
        assert found["ok"] is (code == 0)
        assert (found["differs"], found["power"]) == (code == 1, weak not in results)
        out = capsys.readouterr().out
        assert ("FAIL b" in out) is (wrong in results) and "smallest p 0.5" in out
        assert ("DIFFERS" in out) is (code == 1)
        assert ("NO POWER" in out) is (weak in results) is ("WEAK c" in out)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("--streams 0", "--streams must be"),
        ("--depth 33", "depth must be"),
        ("--depth adaptive", "must be a number"),
        ("--json no/folder/x.json", "No such file"),
    ],
)
def test_bad_settings_are_refused_before_a_model_is_loaded(
    bad, said, capsys, monkeypatch
):
    monkeypatch.setattr("mlx_mtp.cli.verify.load", None)
    assert main(["verify", *bad.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_is_proved():
    assert main(["verify"]) == 0
