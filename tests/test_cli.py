"""The command line: what it prints, and one clear line with code 2 for bad input."""

import json
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest

from mlx_mtp import blas
from mlx_mtp.cli import main

PROMPT = "What is 57 + 68?"


def run(*args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "mlx_mtp", *args],
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


def test_generate_streams_a_thought_an_answer_and_the_acceptance():
    done = run("generate", "--prompt", PROMPT)
    assert done.returncode == 0, done.stderr
    thought, _, answer = done.stdout.partition("</think>")
    assert "Result: 125" in thought and "125" in answer
    assert "drafts accepted" in answer and "tokens per round" in answer


def test_prompt_comes_from_stdin():
    done = run("generate", "--prompt", "-", "--json", input=PROMPT)
    assert "125" in json.loads(done.stdout)["text"]


def test_json_reports_counts_and_blas(capsys):
    assert main(["generate", "-p", PROMPT, "--json", "--depth", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["finish_reason"] == "stop"
    assert report["mtp"]["accepted"] <= report["mtp"]["drafted"]
    assert report["mtp"]["emitted"] == report["generation_tokens"]
    assert report["blas"] == blas.blas_name()


def test_no_mtp_is_mlx_lms_text(capsys, demo):
    texts = []
    for extra in (
        "",
        "--no-mtp",
        "--drafter ngram",
        "--drafter demo",
        "--draft-vocabulary 300",
    ):
        main(["generate", "-p", PROMPT, "--json", *extra.split()])
        texts.append(json.loads(capsys.readouterr().out)["text"])
    _, tokenizer = demo
    message = {"role": "user", "content": PROMPT}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    assert set(texts) == {mlx_lm.generate(*demo, prompt, max_tokens=512)}


def test_seed_fixes_a_sampled_text(capsys):
    texts = []
    for seed in (1, 1, 2):
        args = "generate -p Hello --json --temp 4 --max-tokens 40 --top-k 50 --seed"
        main([*args.split(), str(seed)])
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]


def test_info_names_versions_machine_and_head(capsys):
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["mlx"] == "0.32.4"
    assert report["machine"]["memory_gb"] > 0
    assert report["model"]["mtp_head"]["tensors"] == 15
    assert main(["info"]) == 0
    assert "qwen3_5" in capsys.readouterr().out


def memory(capsys, *args):
    assert main(["info", "--memory", "--json", *args]) == 0
    report = json.loads(capsys.readouterr().out)
    return report["memory"], report["recommended"]


def test_info_plans_memory_and_recommends(capsys):
    plan, best = memory(capsys)
    parts = ("weights", "drafter", "caches", "draft_state", "workspace", "others")
    assert plan["total_gb"] == pytest.approx(
        sum(plan[f"{part}_gb"] for part in parts), abs=0.01
    )
    assert plan["context"] == 4096 and plan["fits"] and plan["drafter_gb"] > 0
    bits = 32 if mx.default_device() == mx.cpu else 16
    assert best["depth"] == 3 and best["bits"] == bits
    assert best["dtype"] in (("float32",) if bits == 32 else ("float16", "bfloat16"))
    wider, _ = memory(capsys, "--context", "8192")
    assert wider["caches_gb"] > plan["caches_gb"]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_unquantised_bits_are_those_of_the_dtype(monkeypatch, capsys, dtype):
    monkeypatch.setattr("mlx_mtp.memory.best_dtype", lambda: dtype)
    _, best = memory(capsys, "--budget-gb", "24")
    assert best["bits"] == 16 and str(dtype) == f"mlx.core.{best['dtype']}"
    assert best["largest_model"]["unquantised"] == 8


def test_info_recommends_less_for_a_smaller_budget(capsys):
    plan, best = memory(capsys)
    total = plan["total_gb"]
    _, three = memory(capsys, "--budget-gb", str(3.5 * total))
    assert three["resident_models"] == 3 and three["depth"] == 3
    eight = plan["weights_gb"] * 8 / best["bits"]  # bits a weight
    none, small = memory(capsys, "--budget-gb", str(eight))
    assert not none["fits"] and small["depth"] == 0 and small["bits"] in (3, 4, 5)
    assert small["resident_models"] == 0
    _, large = memory(capsys, "--budget-gb", "24")
    widest = {32: 4, 16: 8}[best["bits"]]
    assert large["largest_model"] == {"4 bits": 14, "8 bits": 14, "unquantised": widest}
    assert main(["info", "--memory"]) == 0
    assert "resident_models" in capsys.readouterr().out


def test_the_help_says_how_deep(capsys):
    for command in ("generate", "chat", "verify", "tune", "bench"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert "1 to 32" in " ".join(capsys.readouterr().out.split()), command


@pytest.mark.parametrize("options", [["--system-prompt", "y"], ["--thinking", "on"]])
def test_what_a_missing_chat_template_cannot_take_is_refused(
    options, demo, monkeypatch, capsys
):
    model, tokenizer = demo
    monkeypatch.setattr("mlx_mtp.cli.generate.load", lambda _: (model, tokenizer))
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", None)
    assert main(["generate", "-p", "x", "-m", "2", *options]) == 2
    assert "chat template" in capsys.readouterr().err
    assert main(["generate", "-p", "x", "-m", "2"]) == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "-p", "x", "--model", "no/such-model"], "no/such-model"),
        (["generate", "-p", "x", "--model", "/"], "config.json"),
        (["generate", "-p", "x", "--depth", "0"], "depth"),
        (["generate", "-p", "x", "--depth", "99"], "depth"),
        (["generate", "-p", "x", "--depth", "-3", "--no-mtp"], "depth"),
        (["generate", "-p", "\udcff"], "UTF-8"),
        (["generate", "-p", "x", "--seed", "-1"], "seed"),
        (["generate", "-p", "x", "--temp", "-1"], "temperature"),
        (["generate", "-p", "x", "--temp", "nan"], "temperature"),
        (["generate", "-p", "x", "--top-k", "-2"], "top_k"),
        (["generate", "-p", "x", "--top-p", "1.5"], "top_p"),
        (["generate", "-p", "x", "--min-p", "7"], "min_p"),
        (["generate", "-p", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "-p", ""], "prompt"),
        (["generate", "-p", "x", "--raw", "--thinking", "off"], "--raw does not go"),
        (["generate", "-p", "x", "--raw", "--system-prompt", "y"], "--raw does not go"),
        (["generate", "-p", "x", "--drafter", "no/such-model"], "no/such-model"),
        (["generate", "-p", "x", "--draft-vocabulary", "0"], "must be positive"),
        (
            ["generate", "-p", "x", "--drafter", "ngram", "--draft-vocabulary", "9"],
            "does not go with --drafter ngram",
        ),
        (
            ["generate", "-p", "x", "--drafter", "demo", "--draft-vocabulary", "9"],
            "takes no draft vocabulary",
        ),
        (["info", "--model", "no/such-model"], "no/such-model"),
        (["info", "--memory", "--context", "0"], "context"),
        (["info", "--memory", "--budget-gb", "-1"], "budget"),
    ],
)
def test_bad_input_is_one_clear_line_and_code_2(capsys, args, said):
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("mlx-mtp: error: ")
    assert said in error


@pytest.mark.parametrize("args", [[], ["sing"], ["generate"], ["generate", "-m", "x"]])
def test_unknown_arguments_end_with_code_2(args):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2


def test_openblas_precedes_mlx_when_loaded_first():
    code = (
        "from mlx_mtp import blas; loaded = blas.load_openblas(); import mlx.core;"
        "print(loaded, blas.blas_name(), blas.load_openblas())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded, name, again = done.stdout.split()
    assert (name != "reference") == (loaded == "True") and again == "False"


def test_a_closed_pipe_ends_it_silently():
    command = [sys.executable, "-m", "mlx_mtp", "generate", "--prompt", PROMPT]
    with subprocess.Popen(command, stdout=-1, stderr=-1) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
