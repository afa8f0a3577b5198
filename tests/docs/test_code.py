"""The code in the documents: Python compiles and names what is public, commands parse, marked blocks run.

A block that follows the line `<!-- run -->` is executed, in an empty folder; after `<!-- run, torch 2.9 -->`
only with that torch or a newer one.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli import make_parser
from nursery import shared

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
DOCUMENTS = [path for path in PAGES if "design" not in path.parts]  # notes tell of their time
BLOCK = re.compile(
    r"^(<!-- run(?:, torch (?P<torch>[\d.]+))? -->\n+)?```(?P<language>\w+)\n(?P<code>.*?)^```", re.M | re.S
)


def blocks(*languages: str, run: bool | None = None) -> list[object]:
    """Code blocks of all documents in these languages; only those marked to be run, or not, if asked."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for block in BLOCK.finditer(text):
            if block["language"] in languages and run in (None, bool(block[1])):
                line = text[: block.start("code")].count("\n") + 1
                marks = [_needs_torch(block["torch"])] if run and block["torch"] else []
                name = f"{document.relative_to(ROOT)}:{line}"
                code = after(block["code"]) if block["language"] == "diff" else block["code"]
                found.append(pytest.param(code, id=name, marks=marks))
    return found


def after(diff: str) -> str:
    """Return the code that a diff results in."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] != "-")


def _needs_torch(version: str) -> pytest.MarkDecorator:
    versions = (text.partition("+")[0].split(".")[:2] for text in (version, torch.__version__))
    wanted, found = ([int(number) for number in numbers] for numbers in versions)
    return pytest.mark.skipif(found < wanted, reason=f"the block needs torch {version}")


def commands() -> list[object]:
    """Every `holdfast ...` line of the console blocks of all documents."""
    found = []
    for param in blocks("console", "sh", "bash"):
        for line in param.values[0].splitlines():  # type: ignore[attr-defined]
            words = line.strip().removeprefix("$ ")
            if words.startswith("holdfast "):
                found.append(pytest.param(words, id=words))
    return found


@pytest.mark.parametrize("code", blocks("python", "py", "diff"))
def test_python_compiles_and_uses_existing_names(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "holdfast":
            assert hasattr(holdfast, node.attr), f"line {node.lineno}: there is no holdfast.{node.attr}"


@pytest.mark.parametrize("code", blocks("python", "py", "diff", run=True))
def test_marked_python_runs(code: str, tmp_path: Path) -> None:
    done = shared().run(["-c", code], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands())
def test_command_is_parsed(command: str) -> None:
    """The command line of the documents parses; nothing is run."""
    words = shlex.split(command, comments=True)[1:]
    for stop in ("|", "||", "&&", ">", ";"):
        if stop in words:
            words = words[: words.index(stop)]
    try:
        make_parser().parse_args(words)
    except SystemExit as error:
        assert error.code == 0, command  # noqa: PT017 - only --help and --version end with 0
