"""Imports point inward, the core needs no mlx_lm, and mlx_lm is left as it was."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import random_prompt

import mlx_mtp
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder

PACKAGE = Path(mlx_mtp.__file__).parent

# A module may import what stands on a line above its own, and its own subpackage.
LAYERS = [
    {"_build", "_ext", "blas", "reasoning", "reference", "stops"},
    {"ops", "recorded"},
    {"sampling", "telemetry", "state", "adaptive", "memory", "grammar"},
    {"heads"},
    {"drafters", "targets"},
    {"round", "shaping", "prefixes"},
    {"context"},
    {"stream", "thinking", "batch_prompts", "batch_round"},
    {"speculative"},
    {"batch"},
    {"scheduler"},
    {"loading", "processors"},
    {"generation"},
    {"loops", "prompt_cache"},
    {"session", "proof", "tuning"},
    {"benchmark", "evaluation"},
    {"cli", "serve", "forge"},
    {"__main__"},
]
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}
TAKES_MLX_LM = (
    LAYERS[-4]
    | LAYERS[-3]
    | LAYERS[-2]
    | {
        "heads",
        "targets",
        "loading",
        "processors",
        "generation",
        "loops",
        "prompt_cache",
    }
)


def files():
    return sorted(PACKAGE.rglob("*.py"))


def home(file):
    """The top-level module or subpackage that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file):
    """(full module name, whether it is inside this package) of every import."""
    package = ["mlx_mtp", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from names


def test_imports_point_inward():
    # The package's own names are imported at first use.
    inner = [file for file in files() if home(file) != "__init__"]
    assert {home(file) for file in inner} <= set(LAYER), "give it a place in LAYERS"
    for file in inner:
        own = home(file)
        for name in imports(file):
            parts = name.split(".")
            if parts[0] != "mlx_mtp" or parts[1] in (own, "__version__"):
                continue
            assert LAYER[parts[1]] < LAYER[own], f"{file} imports {name}"


def test_only_outer_modules_import_mlx_lm_and_two_the_extension():
    for file in files():
        for name in imports(file):
            if name.split(".")[0] == "mlx_lm":
                assert home(file) in TAKES_MLX_LM, f"{file} imports {name}"
            if name.split(".")[0] == "mlx_vlm":
                assert home(file) in ("targets", "loading"), f"{file} imports {name}"
            if name.startswith("mlx_mtp._ext"):
                assert home(file) in ("ops", "recorded"), f"{file} imports {name}"


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_alone_imports_no_mlx():
    code = "import sys, mlx_mtp; print([m for m in sys.modules if m[:4] == 'mlx.'])"
    assert run_python(code).strip() == "[]"


WITHOUT_MLX_LM = """
import sys
sys.modules["mlx_lm"] = None
import mlx.core as mx
from mlx_mtp import MTPHeadDrafter, NGramDrafter, SamplingParams, speculative_step
from mlx_mtp.targets import Target, TargetOutput

class Counts:
    vocab_size, hidden_size, adapters = 7, None, []
    def weights(self):
        return ()
    def make_cache(self):
        return []
    def prefill(self, tokens, caches):
        ids = mx.arange(7)
        return TargetOutput(1.0 * (ids == (tokens[..., None] + 1) % 7))
    forward = prefill

steps = speculative_step([0, 1, 2], Counts(), NGramDrafter(), depth=3, max_tokens=12)
print([step.token for step in steps], steps.telemetry.accepted > 0)
"""


def test_the_core_decodes_without_mlx_lm():
    """A model without any cache, counting up."""
    expected = f"{[i % 7 for i in range(3, 15)]} True"
    assert run_python(WITHOUT_MLX_LM).strip() == expected


def contents_of_mlx_lm():
    """Every name in its modules and classes, and what stands behind it."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("mlx_lm", "mlx") or module is None:
            continue
        for key, value in vars(module).items():
            found[name, key] = value
            if isinstance(value, type):
                found |= {(name, key, k): v for k, v in vars(value).items()}
    return found


@pytest.mark.parametrize("processors", [[], [lambda tokens, logits: logits]])
def test_a_stream_leaves_mlx_lm_and_the_model_as_they_were(qwen_head, processors):
    model = qwen_head.target.model
    decoder = SpeculativeDecoder(qwen_head.target, qwen_head.drafter, 2)
    modules = [(m, dict(vars(m)), dict(m)) for m in model.modules()]
    before = contents_of_mlx_lm()
    steps = decoder.stream(
        random_prompt(5, 128, 1), params=SamplingParams(1.0), processors=processors
    )
    for _ in range(9):
        next(steps)
    during = contents_of_mlx_lm()
    steps.close()
    after = contents_of_mlx_lm()
    for now in (during, after):
        assert now.keys() == before.keys()
        assert [k for k in before if now[k] is not before[k]] == []
    for module, attributes, items in modules:
        assert vars(module) == attributes
        assert module.keys() == items.keys()
        assert all(module[key] is value for key, value in items.items())
