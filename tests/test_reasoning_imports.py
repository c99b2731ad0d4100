"""The reasoning package stands on its own."""

import ast
import subprocess
import sys
from pathlib import Path

import mlx_mtp.reasoning as reasoning

FOLDER = Path(reasoning.__file__).parent


def test_importing_reasoning_loads_neither_mlx_nor_mlx_lm_nor_the_extension():
    code = (
        "import sys, mlx_mtp.reasoning\n"
        "heavy = ('mlx', 'mlx_lm', 'mlx_mtp._ext', 'numpy', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    path = f"import sys; sys.path.insert(0, {str(FOLDER.parents[1])!r})\n"
    out = subprocess.run(
        [sys.executable, "-c", path + code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_no_file_imports_outside_the_standard_library_and_the_package():
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            for name in names:
                assert name.split(".")[0] in sys.stdlib_module_names, (file, name)


def test_all_names_every_public_name():
    modules = {file.stem for file in FOLDER.glob("*.py")}
    public = {name for name in vars(reasoning) if not name.startswith("_")}
    # A function may have the name of its module (`resolve`).
    assert set(reasoning.__all__) - public == set()
    assert public - set(reasoning.__all__) <= modules
