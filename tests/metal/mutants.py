"""Small mistakes put into the shipped kernels, one at a time: the tests must see each.

    python tests/metal/mutants.py [--all] [--jobs N]

Without --all: removed barriers and dropped lanes only. Prints every mutant that nothing
saw; those that survivors.txt explains are expected to live.
"""

import argparse
import multiprocessing
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
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
    ("last simdgroup dropped", r"team\.lane < team\.simdgroups", "team.lane + 1 < team.simdgroups"),
    ("no simd sum", r"simd_(sum|total|prefix)\((\w+)(?:, lane)?\)", r"\2"),
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
        return f"{self.file}: {self.rule}: {self.line}" + (f" #{self.at}" * bool(self.at))


def mutants(rules):
    seen = {}
    for file in HEADERS:
        text = (host.METAL / file).read_text()
        code = re.sub(r"//.*|^#.*|^ *\[\[.*", lambda m: " " * len(m[0]), text, flags=re.M)
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


def sources_of(folder, file):
    """The .metal files to run for a header, without float16."""
    found = {p for p in folder.glob("*.metal") if reaches(folder, p.name, file)}
    sampling = {folder / "sample.metal", folder / "verify_draft.metal"}
    if found & sampling:
        found |= sampling
    for path in found:
        text = path.read_text()
        path.write_text(re.sub(r"^instantiate_\w+\(float16.*\n", "", text, flags=re.M))
    return sorted(found)


def runs(machine, names, seed):
    """Outputs of the battery for the kernels of some .metal files."""
    dtypes = ["float32", "bfloat16"]
    if "sample.metal" in names:
        yield from battery.sampling(machine, seed, dtypes)
        yield from battery.edges(machine, seed)
    if "commit_rows.metal" in names:
        yield from battery.commits(machine, seed)
    if "gated_delta_replay.metal" in names:
        yield from battery.replays(machine, seed, dtypes)


def differs(library, names, golden):
    """Runs in a process of its own: exit code 1 if any output is not as it was."""
    machine = emulator.Emulator(library)
    for seed in (0, 1, 2):
        try:
            for run, expected in zip(runs(machine, names, seed), golden, strict=True):
                for x, y in zip(run, expected, strict=True):
                    same = np.allclose(x, y, rtol=1e-6, atol=1e-6, equal_nan=True)
                    if not same:
                        sys.exit(1)
        except RuntimeError:
            sys.exit(1)


def in_process(function, *arguments, timeout=60):
    """Whether a call in a process of its own returned normally."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
    process.join()
    return process.exitcode == 0


def build_folder(mutant, folder):
    for path in host.METAL.glob("*.*"):
        if path.suffix in (".h", ".metal"):
            (folder / path.name).write_text(path.read_text())
    (folder / mutant.file).write_text(mutant.text)
    return sources_of(folder, mutant.file)


def killer(mutant, golden):
    """What saw a mutant: a tool's name, or None."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sources = build_folder(mutant, folder)
        options = {"include": [folder], "flags": ["-O1", "-w"]}
        try:
            library = emulator.build(sources, folder / "k.so", **options)
        except RuntimeError:
            return "compiler"
        names = [path.name for path in sources]
        if not in_process(differs, library, names, golden(names)):
            return "results"
        for sanitizer in ("address", "thread"):
            program = emulator.build_replay(
                sources, folder / sanitizer, sanitize=sanitizer, **options
            )
            recorder = emulator.Recorder()
            list(runs(recorder, names, 1))
            recorder.save(folder / "recording")
            try:
                if emulator.replay(program, folder / "recording", timeout=120):
                    return sanitizer
            except emulator.subprocess.TimeoutExpired:
                return sanitizer
    return None


class Golden:
    """The outputs of the true kernels."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        sources = emulator.build(
            host.SOURCES, folder / "k.so", include=[host.METAL], flags=["-O1"]
        )
        self._machine = emulator.Emulator(sources)
        self._known = {}
        self._lock = threading.Lock()

    def __call__(self, names):
        key = tuple(names)
        with self._lock:
            if key not in self._known:
                self._known[key] = list(runs(self._machine, names, 0))
        return self._known[key]


def survivors():
    """Mutants that can not be seen, with the reason."""
    lines = (HERE / "survivors.txt").read_text().splitlines()
    pairs = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    return {mutant.strip(): reason.strip() for mutant, reason in pairs}


def run(chosen, jobs=1, report=print):
    """Unexplained survivors and how often each tool saw a mutant."""
    golden = Golden()
    counts, alive = {}, []
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, seen in zip(
            chosen, pool.map(lambda m: killer(m, golden), chosen), strict=True
        ):
            counts[seen] = counts.get(seen, 0) + 1
            if seen is None:
                alive.append(str(mutant))
                report(f"alive: {mutant}")
    known = survivors()
    return [name for name in alive if name not in known], counts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    rules = ESSENTIAL + (OTHERS if arguments.all else [])
    chosen = list(mutants(rules))
    unexplained, counts = run(chosen, arguments.jobs)
    print(f"{len(chosen)} mutants, seen by {counts}")
    print(f"{len(unexplained)} alive without a reason in survivors.txt")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
