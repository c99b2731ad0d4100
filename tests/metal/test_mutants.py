"""Mistakes in the shipped kernels do not go unnoticed: see mutants.py."""

import mutants
import pytest


def test_a_removed_barrier_is_seen():
    chosen = [m for m in mutants.mutants(mutants.ESSENTIAL) if m.rule == "no barrier"]
    assert len(chosen) > 8
    assert mutants.run(chosen)[0] == []


@pytest.mark.slow
def test_every_mistake_is_seen_or_explained():
    chosen = list(mutants.mutants(mutants.ESSENTIAL + mutants.OTHERS))
    assert len(chosen) > 300
    assert mutants.run(chosen)[0] == []


def test_no_mistake_no_alarm(tmp_path):
    text = (mutants.host.METAL / "draw.h").read_text()
    same = mutants.Mutant("draw.h", "none", "", 0, text + "\n")
    assert mutants.Workshop(tmp_path).killer(same) is None
