"""lm-evaluation-harness through MTP, on a task of our own."""

import math

import mlx.core as mx
import mlx_lm
import pytest

pytest.importorskip("lm_eval", reason="needs pip install 'mlx-mtp[lm-eval]'")

import lm_eval
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.api.task import ConfigurableTask

from mlx_mtp.evaluation import MTPLM

SUMS = [(57, 68), (301, 402), (25, 31)]


@pytest.fixture(scope="module")
def model():
    return get_model("mlx_mtp")("demo", depth=3)


def ask(text, **options):
    args = (text, {"until": [], **options})
    return Instance("generate_until", doc={}, arguments=args, idx=0)


def sums(name, **generation):
    docs = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in SUMS]
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: {"test": Dataset.from_list(docs)},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 120, **generation},
            "metric_list": [{"metric": "exact_match"}],
            "filter_list": [
                {
                    "name": "number",
                    "filter": [
                        {"function": "regex", "regex_pattern": r"(\d+)\D*$"},
                        {"function": "take_first"},
                    ],
                }
            ],
        }
    )


def test_the_harness_runs_tasks_through_mtp(model):
    tasks = [sums("greedy"), sums("sampled", do_sample=True, temperature=0.3)]
    found = lm_eval.simple_evaluate(
        model, tasks=tasks, apply_chat_template=True, bootstrap_iters=0
    )
    for name in ("greedy", "sampled"):
        assert found["results"][name]["exact_match,number"] == 1.0
    assert model.round_tokens / model.rounds > 2


def test_answers_are_mlx_lms_without_the_thought(model):
    context = model.apply_chat_template([{"role": "user", "content": "What is 5 + 7?"}])
    (answer,) = model.generate_until([ask(context)], disable_tqdm=True)
    text = mlx_lm.generate(model._model, model.tokenizer, context, max_tokens=256)
    assert text.endswith(f"</think>\n\n{answer}") and "12" in answer
    assert "12" in text.partition("</think>")[0]  # where it does not count
    (cut,) = model.generate_until([ask(context, until="12")], disable_tqdm=True)
    assert cut == answer[: answer.index("12")]
    (unfinished,) = model.generate_until(
        [ask(context, max_gen_toks=12)], disable_tqdm=True
    )
    assert unfinished == ""


def test_stop_strings_end_a_stream_without_thoughts(model):
    quick = MTPLM.__new__(MTPLM)
    quick.__dict__ = {**model.__dict__, "_thinks": False, "rounds": 0}
    quick._template = {"enable_thinking": False}
    message = {"role": "user", "content": "Sort in ascending order: 31, 12, 45, 20, 77"}
    context = quick.apply_chat_template([message])
    (whole,) = quick.generate_until([ask(context)], disable_tqdm=True)
    rounds = quick.rounds
    (cut,) = quick.generate_until([ask(context, until=[",", ""])], disable_tqdm=True)
    assert cut == whole.partition(",")[0] != whole
    assert quick.rounds - rounds < rounds


def test_scores_are_the_targets(model):
    context, continuation = "What is 57 + 68?", " 125"
    request = Instance(
        "loglikelihood", doc={}, arguments=(context, continuation), idx=0
    )
    ((score, greedy),) = model.loglikelihood([request])
    ids = model.tokenizer.encode(context + continuation)
    start = len(model.tokenizer.encode(context))
    rows = model._model(mx.array([ids]))[0]
    logs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    expected = sum(logs[i - 1, ids[i]].item() for i in range(start, len(ids)))
    assert math.isclose(score, expected, rel_tol=1e-4)
    likeliest = mx.argmax(rows, axis=-1).tolist()
    assert bool(greedy) == all(
        likeliest[i - 1] == ids[i] for i in range(start, len(ids))
    )


def test_a_model_without_a_head_needs_another_drafter(monkeypatch):
    monkeypatch.setattr("mlx_mtp.evaluation.find_decoder", lambda *_: None)
    with pytest.raises(ValueError, match="no MTP head"):
        MTPLM("demo")
