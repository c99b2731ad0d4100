"""The GitHub workflows: pinned actions, few rights."""

import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[1] / ".github/workflows"


@pytest.mark.parametrize("name", ["ci.yml", "wheels.yml"])
def test_actions_are_pinned_and_rights_are_few(name):
    workflow = yaml.safe_load((FOLDER / name).read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job, body in workflow["jobs"].items():
        may = {"id-token": "write"} if job == "publish" else None
        assert body.get("permissions") == may
        for step in body["steps"]:
            action = step.get("uses")
            assert action is None or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)
            if action and action.startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_only_a_tag_publishes():
    workflow = yaml.safe_load((FOLDER / "wheels.yml").read_text())
    # YAML 1.1 reads the key "on" as true.
    assert workflow[True]["push"] == {"tags": ["v*"]}
    assert workflow["jobs"]["publish"]["if"] == "github.event_name == 'push'"
