"""Small mistakes put into the shipped kernels, one at a time: the tests must see each.

    python tests/metal/mutants.py [--all] [--file NAME] [--part 1/4] [--keep FILE]

Without --all: removed barriers and dropped lanes only. Prints every mutant that nothing
saw; those that survivors.txt explains are expected to live. --keep remembers what was
seen: the next run with the same file goes on where this one stopped, and after a better
test tries only what lived.
"""

import argparse
import hashlib
import multiprocessing
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "emulator")]

import battery  # noqa: E402
import emulator  # noqa: E402
import host  # noqa: E402

# Name, pattern, replacement. Operators stand between spaces, template brackets do not.
ESSENTIAL = [
    ("no barrier", r"threadgroup_barrier\(.*?\);", ";"),
    ("upper lanes dropped", r"delta = 16", "delta = 8"),
    ("upper lanes dropped", r"delta < 32", "delta < 16"),
    (
        "last simdgroup dropped",
        r"team\.lane < team\.simdgroups",
        "team.lane + 1 < team.simdgroups",
    ),
    (
        "no simd operation",
        r"(?<!ulong )simd_(?:sum|total|prefix|min|max)"
        r"\(((?:[^(),]|\([^()]*\))*)(?:, lane)?\)",
        r"(\1)",
    ),
    ("one lane for all", r"simd_max\(", "simd_min("),
    ("one lane for all", r"simd_min\(", "simd_max("),
]
OTHERS = [
    ("bound shifted", r" < (?!<)", " <= "),
    ("bound shifted", r" <= ", " < "),
    ("bound shifted", r" > (?!>)", " >= "),
    ("bound shifted", r" >= ", " > "),
    ("comparison turned", r" == ", " != "),
    ("comparison turned", r" != ", " == "),
    ("one off", r" [+-] 1(u|ul)?\b(?!\.)", ""),
    ("other bound", r"metal::min\(", "metal::max("),
    ("other bound", r"metal::max\(", "metal::min("),
    ("other connective", r" && ", " || "),
    ("other connective", r" \|\| ", " && "),
    ("other sign", r" - (?=[a-z(])", " + "),
    ("other sign", r" \+ (?=[a-z(])", " - "),
]
HEADERS = [p.name for p in sorted(host.METAL.glob("*.h")) if p.stem not in ("params",)]


@dataclass(frozen=True)
class Mutant:
    file: str
    rule: str
    line: str  # the changed line
    at: int  # which of equal ones
    text: str

    def __str__(self):
        return f"{self.file}: {self.rule}: {self.line}" + (
            f" #{self.at}" * bool(self.at)
        )

    @property
    def digest(self):
        """Of all the text that is run."""
        texts = {p.name: p.read_text() for p in sorted(host.METAL.glob("*.[hm]*"))}
        texts[self.file] = self.text
        return hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:16]


def mutants(rules):
    seen = {}
    for file in HEADERS:
        text = (host.METAL / file).read_text()
        code = re.sub(
            r"//.*|^#.*|^ *\[\[.*", lambda m: " " * len(m[0]), text, flags=re.M
        )
        for name, pattern, replacement in rules:
            for match in re.finditer(pattern, code):
                new = text[: match.start()] + match.expand(replacement)
                first = text.rfind("\n", 0, match.start()) + 1
                line = new[first:] + text[match.end() :].split("\n")[0]
                line = " ".join(line.split())
                at = seen[file, name, line] = seen.get((file, name, line), -1) + 1
                yield Mutant(file, name, line, at, new + text[match.end() :])


def reaches(folder, name, file):
    """Whether a file includes another, itself included."""
    included = re.findall(r'#include "(.*)"', (folder / name).read_text())
    return name == file or any(reaches(folder, each, file) for each in included)


def sources_of(folder, file, dtypes):
    """The .metal files to run for a header, in some dtypes only."""
    found = {p for p in folder.glob("*.metal") if reaches(folder, p.name, file)}
    names = ("sample", "verify_coupled", "verify_draft")
    sampling = {folder / f"{name}.metal" for name in names}
    if found & sampling:
        found |= {*sampling, folder / host.UNITS.name}
    others = "|".join(set(host.DTYPES) - set(dtypes))
    for path in found:
        text = re.sub(
            rf"^instantiate_\w+\(({others}).*\n", "", path.read_text(), flags=re.M
        )
        path.write_text(text)
    return sorted(found)


def dtypes_of(file):
    """Only some headers depend on the dtype."""
    return ["float32", "bfloat16"] if file in ("row.h", "threshold.h") else ["float32"]


def runs(machine, names, dtypes, seed):
    """Outputs of the battery for the kernels of some .metal files."""
    if "sample.metal" in names:
        for part in battery.SAMPLING:
            every = part in (battery.sampling, battery.coupled)
            yield from part(machine, seed, dtypes) if every else part(machine, seed)
    if "commit_rows.metal" in names:
        yield from battery.commits(machine, seed)
    if "gated_delta_replay.metal" in names:
        yield from battery.replays(machine, seed, dtypes)


def agree(x, y):
    """Equal integers, and floats up to rounding."""
    if x.dtype.kind in "iu":
        return np.array_equal(x, y)
    return np.allclose(x, y, rtol=1e-6, atol=1e-6, equal_nan=True)


def differs(library, names, dtypes, golden):
    """Runs in a process of its own: exit code 1 if any output is not as it was."""
    machine = emulator.Emulator(library)
    for seed in (0, 1, 2):
        try:
            results = runs(machine, names, dtypes, seed)
            for run, expected in zip(results, golden, strict=True):
                for x, y in zip(run, expected, strict=True):
                    if not agree(x, y):
                        sys.exit(1)
        except RuntimeError:
            sys.exit(1)


def in_process(function, *arguments, seconds=20):
    """Whether a call in a process of its own, with so much CPU, returned normally."""

    def limited():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=limited)
    process.start()
    process.join()
    return process.exitcode == 0


class Workshop:
    """Builds mutants and compares them with the outputs of the true kernels."""

    def __init__(self, folder):
        self.folder = Path(folder)
        library = emulator.build(
            host.SOURCES, self.folder / "true.so", include=[host.METAL], flags=["-O0"]
        )
        self.machine = emulator.Emulator(library)
        self.engines = {None: self.folder / "true.engine.o"}
        self.golden = {}

    def expected(self, names, dtypes):
        key = (*names, *dtypes)
        if key not in self.golden:
            self.golden[key] = list(runs(self.machine, names, dtypes, 0))
        return self.golden[key]

    def build(self, sources, folder, sanitize=None):
        build = emulator.build_replay if sanitize else emulator.build
        out = folder / (sanitize or "plain.so")
        level = "-O1" if sanitize else "-O0"
        options = {"include": [folder], "flags": [level, "-w"], "sanitize": sanitize}
        if engine := self.engines.get(sanitize):
            return build(sources, out, engine=engine, **options)
        build(sources, out, **options)
        self.engines[sanitize] = self.folder / f"{sanitize}.engine.o"
        shutil.copy(out.with_name(f"{out.stem}.engine.o"), self.engines[sanitize])
        return out

    def killer(self, mutant):
        """What saw a mutant: a tool's name, or None."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for path in [*host.METAL.glob("*.h"), *host.SOURCES]:
                shutil.copy(path, folder)
            (folder / mutant.file).write_text(mutant.text)
            dtypes = dtypes_of(mutant.file)
            sources = sources_of(folder, mutant.file, dtypes)
            names = [path.name for path in sources]
            try:
                library = self.build(sources, folder)
            except RuntimeError:
                return "compiler"
            golden = self.expected(names, dtypes)
            if not in_process(differs, library, names, dtypes, golden):
                return "results"
            return self.sanitizer(mutant, sources, folder, names, dtypes)

    def sanitizer(self, mutant, sources, folder, names, dtypes):
        """The one that sees a mutant with the right results, or None."""
        recorder = emulator.Recorder()
        list(runs(recorder, names, dtypes, 1))
        recorder.save(folder / "recording")
        barrier = mutant.rule == "no barrier"
        for name in ["thread"] if barrier else ["address", "undefined"]:
            program = self.build(sources, folder, name)
            try:
                if emulator.replay(program, folder / "recording"):
                    return name
            except subprocess.TimeoutExpired:
                return name
        return None


def survivors():
    """Mutants that can not be seen, with the reason."""
    lines = (HERE / "survivors.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    pairs = [line.rsplit(" | ", 1) for line in lines]
    return {mutant.strip(): reason.strip() for mutant, reason in pairs}


class Memory:
    """The mutants that were seen, in a file if there is one."""

    def __init__(self, path=None):
        self.path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.tools = dict(line.split() for line in lines)

    def add(self, mutant, tool):
        if self.path:
            with self.path.open("a") as file:
                file.write(f"{mutant.digest} {tool}\n")


def run(chosen, report=print, memory=None):
    """Unexplained survivors and counts by tool."""
    known, counts, alive = survivors(), {}, []
    memory = memory or Memory()
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(folder)
        for number, mutant in enumerate(chosen):
            tool = memory.tools.get(mutant.digest)
            if tool is None and (tool := workshop.killer(mutant)):
                memory.add(mutant, tool)
            counts[tool] = counts.get(tool, 0) + 1
            if tool is None and str(mutant) not in known:
                alive.append(str(mutant))
                report(f"{number}: alive: {mutant}")
            elif tool is not None and str(mutant) in known:
                report(f"{number}: explained, but seen by {tool}: {mutant}")
    return alive, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--file", action="append", help="only mutants of this header")
    parser.add_argument("--part", default="1/1", help="a share of them, as 2/4")
    parser.add_argument("--keep", type=Path, help="a file for what was seen")
    arguments = parser.parse_args()
    rules = ESSENTIAL + (OTHERS if arguments.all else [])
    files = arguments.file or HEADERS
    chosen = [mutant for mutant in mutants(rules) if mutant.file in files]
    part, parts = map(int, arguments.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    memory = Memory(arguments.keep)
    alive, counts = run(chosen, lambda line: print(line, flush=True), memory)
    print(f"{len(chosen)} mutants, seen by {counts}")
    print(f"{len(alive)} alive without a reason in survivors.txt")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
