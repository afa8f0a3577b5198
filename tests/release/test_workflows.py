"""The files of `.github`: they parse, and name only targets, commands and files that exist."""

from __future__ import annotations

import re
import tokenize
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import make_parser

ROOT = Path(__file__).parent.parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def parsed(path: Path) -> Any:
    """Return the document of a workflow. YAML takes its key `on` for True."""
    return yaml.safe_load(path.read_text())


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(path)["jobs"].values() for step in job["steps"]]


def test_all_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "pages", "release"]
    assert [path.stem for path in FORMS] == ["idea", "problem"]


@each_workflow
def test_each_workflow_has_limits_and_few_rights(path: Path) -> None:
    workflow = parsed(path)
    assert set(workflow) <= {"name", True, "permissions", "concurrency", "jobs"}
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
    for step in steps(path):
        assert ("uses" in step) != ("run" in step)
        assert "@" in step.get("uses", "@")


@each_workflow
def test_each_command_is_a_target_of_the_makefile(path: Path) -> None:
    for step in steps(path):
        called = re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
        assert set(called) <= TARGETS


@each_workflow
def test_each_is_marked_as_not_run(path: Path) -> None:
    assert path.read_text().startswith("# Not run yet")


def test_each_pair_of_python_and_torch_is_tested() -> None:
    matrix = parsed(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    pairs = set(product(matrix["python"], matrix["torch"]))
    assert len(pairs) == 15
    left_out = {(one["python"], one["torch"]) for one in matrix["exclude"]}
    assert left_out < pairs
    project = (ROOT / "pyproject.toml").read_text()
    classifiers = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert matrix["python"] == classifiers


def test_a_release_is_published_without_a_password_and_with_attestations() -> None:
    jobs = parsed(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["steps"][-1]["with"] == {"attestations": True}
    assert jobs["build"]["permissions"]["attestations"] == "write"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_each_form_asks_for_the_versions(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert field["attributes"]["label"]
    labels = [field["attributes"]["label"] for field in form["body"]]
    (asked,) = (label for label in labels if "holdfast version" in label)
    words = re.search(r"`holdfast (.*)`", asked)
    assert words
    assert make_parser().parse_args(words[1].split()).json


def test_the_version_is_the_same_in_both_places() -> None:
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    with tokenize.open(ROOT / "src" / "holdfast" / "__init__.py") as file:
        package = re.search(r'^__version__ = "(.*)"$', file.read(), re.M)
    assert project
    assert package
    assert project[1] == package[1]


def test_continuous_integration_calls_the_targets() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make ")] == [
        "make lint",
        "make docs-site",
        "make test",
    ]


def test_each_fragment_of_the_changelog_has_a_kind() -> None:
    kinds = re.findall(
        r'directory = "(added|changed|fixed|removed|security)"', (ROOT / "pyproject.toml").read_text()
    )
    fragments = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert len(kinds) == 5
    assert [path.name for path in fragments if path.name.split(".")[-2] not in kinds] == []
