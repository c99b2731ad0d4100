"""What was measured, as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from .measure import PLAIN

COLUMNS = (
    "arm",
    "tokens/s",
    "spread",
    "against mlx_lm (95 %)",
    "against its rival",
    "tokens a round",
    "accepted at 1, 2, ...",
    "CPU a token",
    "first token",
    "J/token",
    "peak GB",
)


def markdown(header: dict, rows: Sequence[dict]) -> str:
    """The report as Markdown, a table for every prompt set and temperature."""
    versions = ", ".join(f"{k} {v}" for k, v in header["versions"].items())
    machine = ", ".join(str(v) for v in header["machine"].values())
    out = [f"# Speed of {header['model']}", "", f"{versions}; {machine}.", ""]
    out += [f"{note}  " for note in header["notes"]]
    for (name, temperature), group in grouped(rows):
        size = group[0]["prompt_tokens"]
        out += ["", f"## {name}, temperature {temperature:g}, {size:.0f} prompt tokens"]
        out += ["", line(COLUMNS), line(["---"] * len(COLUMNS))]
        out += [line(cells(row)) for row in group]
    return "\n".join(out) + "\n"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cells(row: dict) -> list[str]:
    """A row as text, column by column."""
    per_round, joules = row["tokens_a_round"], row["joules_a_token"]
    rival = row["ratio_to_rival"]
    return [
        row["arm"],
        f"{row['tps']:.1f}",
        f"{row['spread']:.0%}",
        _interval(row["ratio"]),
        "" if rival is None else f"{row['rival']}: {_interval(rival)}",
        "" if per_round is None else f"{per_round:.2f}",
        " ".join(f"{x:.0%}" for x in row["acceptance"]),
        f"{1e3 * row['cpu_s_a_token']:.2f} ms",
        f"{1e3 * row['first_token_s']:.0f} ms",
        "" if joules is None else f"{joules:.2f}",
        f"{row['peak_gb']:.2f}",
    ]


def _interval(ratio: dict) -> str:
    return f"{ratio['mean']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def grouped(rows: Sequence[dict]) -> Iterator[tuple[tuple[str, float], list[dict]]]:
    """Rows by prompt set and temperature, in the order of the measurement."""
    groups: dict[tuple[str, float], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["prompt_set"], row["temperature"]), []).append(row)
    yield from groups.items()


def pyplot():
    """matplotlib's, for files; raises ImportError if it is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None
    return pyplot


def check_plot(path: str) -> None:
    """Raises ImportError without matplotlib, ValueError for a kind it cannot write."""
    plt, ending = pyplot(), Path(path).suffix[1:].lower()
    figure = plt.figure()
    kinds = figure.canvas.get_supported_filetypes()
    plt.close(figure)
    if ending and ending not in kinds:
        raise ValueError(f"--plot must end in one of {', '.join(kinds)}: {path}")


def plot(rows: Sequence[dict], path: str) -> None:
    """Draws speed by depth, and acceptance by position, for every prompt set."""
    plt = pyplot()
    figure, (speed, accepted) = plt.subplots(1, 2, figsize=(11, 4.5))
    for (name, temperature), group in grouped(rows):
        ours = [row for row in group if isinstance(row["depth"], int)]
        if not ours:
            continue
        mean, low, high = (
            [row["ratio"][key] for row in ours] for key in ("mean", "low", "high")
        )
        error = [
            [a - b for a, b in zip(mean, low, strict=True)],
            [a - b for a, b in zip(high, mean, strict=True)],
        ]
        depths, label = [row["depth"] for row in ours], f"{name}, T={temperature:g}"
        speed.errorbar(depths, mean, error, marker="o", capsize=3, label=label)
        deepest = ours[-1]["acceptance"]
        accepted.plot(range(1, len(deepest) + 1), deepest, marker="o")
    speed.axhline(1, linestyle="--", color="gray")
    speed.set(xlabel="drafts a round", ylabel=f"speed against {PLAIN}", ylim=(0, None))
    speed.legend(fontsize="small")
    accepted.set(xlabel="position of the draft", ylabel="accepted", ylim=(0, 1.02))
    for axes in (speed, accepted):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
