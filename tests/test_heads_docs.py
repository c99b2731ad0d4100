"""docs/heads.md says what the data says."""

from pathlib import Path

from mlx_mtp.heads.families import HEADS, REFUSED

PAGE = (Path(__file__).parents[1] / "docs" / "heads.md").read_text()


def tables():
    specs = {}
    for entry in HEADS.entries():
        specs.setdefault(entry.value.family, (entry.value, []))[1].append(entry)
    heads = []
    for family, (spec, entries) in specs.items():
        types = ", ".join(f"`{entry.model_type}`" for entry in entries)
        types += " with experts" if any(entry.when for entry in entries) else ""
        cells = (
            family,
            types,
            spec.hidden,
            ", ".join(half[0] for half in spec.order),
            "less 1" if spec.norm_offset else "as such",
            ", ".join(spec.own) or "-",
            "several" if spec.count else "one",
            f"`{spec.place}`",
            spec.source,
        )
        heads.append(f"| {' | '.join(cells)} |")
    return heads, [f"| `{name}` | {why} |" for name, why in sorted(REFUSED.items())]


def test_every_family_and_refusal_has_its_row():
    lines = PAGE.splitlines()
    for rows in tables():
        start = lines.index(rows[0])
        assert lines[start : start + len(rows)] == rows
        assert not lines[start + len(rows)].startswith("|")
