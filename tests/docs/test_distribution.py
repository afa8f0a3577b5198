"""The distribution's name, `torch-holdfast`, in every document, source and setting.

The name `holdfast` on the package index belongs to another project; ours are only
the import and the command.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).parent.parent.parent
KINDS = {".md", ".py", ".toml", ".txt", ".yaml", ".yml", ".sh", ".cfg"}
FOLDERS = ("docs", "src", "tests", "examples", "benchmarks", "campaigns")
PATHS = [*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
FILES = [ROOT / "Makefile", *(path for path in (ROOT / ".ci").rglob("*") if path.is_file())]
FILES += sorted(path for path in PATHS if path.suffix in KINDS)
INSTALL = re.compile(
    r"\b(?:pip3?|pipx|uv|uvx|poetry|conda|mamba)\b[^\n`|;&]*\b(?:install|add|download|wheel|run)\b"
)
NAMED = re.compile(r"(?:^|[\s'\"=])holdfast(?=$|[\s'\"`\[=<>~!@,;.)])")
EXTRA = re.compile(r"(?<![\w.-])holdfast\[[a-z]+[\],]")
METADATA = re.compile(r"\b(?:version|distribution|metadata|requires)\(\s*['\"]holdfast['\"]")


def wrong_lines(text: str) -> list[int]:
    """Return the numbers of the lines that take `holdfast` for the distribution's name."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        call = INSTALL.search(line)
        if (call and NAMED.search(line[call.end() :])) or EXTRA.search(line) or METADATA.search(line):
            found.append(number)
    return found


def test_no_file_names_the_distribution_of_another_project() -> None:
    wrong = [(str(path), number) for path in FILES for number in wrong_lines(path.read_text())]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "$ pip install NAME",
        "setup: pip install -q NAME",
        "pip install 'NAME[remote]'",
        "needs the extra `NAME[report]`",
        'bench = ["NAME[demo,remote]"]',
        "uv add NAME",
        "uv pip install NAME==0.1",
        "python -m pip install --upgrade NAME.",
        'importlib.metadata.version("NAME")',
    ],
)
def test_a_wrong_line_is_found(line: str) -> None:
    assert wrong_lines(line.replace("NAME", "holdfast")) == [1]
    assert wrong_lines(line.replace("NAME", "torch-holdfast")) == []


def test_the_metadata_has_the_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "torch-holdfast"
    assert project["scripts"] == {"holdfast": "holdfast.cli:main"}
    assert importlib.metadata.metadata("torch-holdfast")["Version"] == project["version"]


def test_every_extra_that_is_mentioned_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "\n".join(path.read_text() for path in FILES)
    lists = re.findall(r"torch-holdfast\\?\[([a-z, ]+)\\?\]", text)
    mentioned = {extra.strip() for names in lists for extra in names.split(",")}
    assert mentioned <= set(extras)
    assert {"remote", "report", "examples"} <= mentioned
