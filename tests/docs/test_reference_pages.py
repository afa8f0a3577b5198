"""The pages of settings and of errors: they have all that the code has, in its words, and nothing else."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from holdfast import errors

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "holdfast"
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
ERRORS = (ROOT / "docs" / "errors.md").read_text()

OURS = re.compile(r"HOLDFAST_[A-Z_]*[A-Z]")
INTERNAL = {
    "HOLDFAST_KILL_AT": "kills a process at a failpoint, in tests of crashes only",
    "HOLDFAST_KILL_MARK": "file that such a kill makes, in tests of crashes only",
    "HOLDFAST_PATH": "end of _HOLDFAST_PATH, in the script that a shell leaves a job's environment by",
    "HOLDFAST_SANDBOX": "folder of the homes of a dry run; check, replay and tune set it",
    "HOLDFAST_TRIAL": "plan of a run for check and replay, which set it",
    "HOLDFAST_WATCH": "watches of a run for check, replay, standbys and supervise, which set it",
}
"""Variables that no user sets and no job receives, with the reason."""

READ = re.compile(r"""(?:\bos\.environ(?:\.get\(|\[)|\bread_integer\()["']([A-Z][A-Z0-9_]*)["']""")
OF_SHELLS = {"COMP_LINE": "the line that a shell completes; argcomplete's protocol"}

CLASSES = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, BaseException) and one is not errors.HoldfastError
]
MESSAGE = re.compile(r'^\| "(.+?)" \|', re.MULTILINE)


@cache
def source() -> str:
    """The text of the package: its Python and shell scripts."""
    return "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".sh"))


def settings() -> set[str]:
    """Variables that have a row on the page of settings."""
    cells = re.findall(r"^\| (`[^|]+) \|", SETTINGS, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([A-Za-z_0-9]+)`", cell)} - {"envs"}


@cache
def on_one_line() -> dict[Path, str]:
    """The Python files, without the line breaks between the parts of a string."""
    return {
        path: re.sub(r"""["']\s*\n\s*f?["']""", "", path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def strings(path: Path) -> list[str]:
    """The strings of a file, each with a gap in the place of each value that it is made of."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def is_printed(message: str) -> bool:
    """Return True if one string of the package has the parts of a message, whose gaps are `...`."""
    parts = message.split("...")
    longest = max(parts, key=len)
    files = (path for path, text in on_one_line().items() if longest in text)  # parsing all takes seconds
    return any(has_in_order(text, parts) for path in files for text in strings(path))


def has_in_order(text: str, parts: list[str]) -> bool:
    end = 0
    for part in parts:
        if (begin := text.find(part, end)) < 0:
            return False
        end = begin + len(part)
    return True


def test_each_variable_of_holdfast_is_a_setting_or_has_a_reason_not_to_be() -> None:
    used, shown = set(OURS.findall(source())), {name for name in settings() if OURS.fullmatch(name)}
    assert used - shown == INTERNAL.keys()
    assert shown <= used


def test_each_variable_of_others_that_is_read_is_a_setting() -> None:
    assert set(READ.findall(source())) - settings() - INTERNAL.keys() == OF_SHELLS.keys()


def test_the_page_names_no_variable_that_the_code_lacks() -> None:
    assert len(settings()) > 80
    made = {name.replace("_SETUP_", "_") for name in settings()}  # as `setup_variables` does
    assert made <= set(re.findall(r"\w+", source()))
    assert set(OURS.findall(SETTINGS)) <= settings()


@pytest.mark.parametrize("one", CLASSES)
def test_each_class_has_its_row(one: type[BaseException]) -> None:
    assert re.search(rf"^\| \[?`{one.__name__}`", ERRORS, re.MULTILINE)
    if issubclass(one, errors.HoldfastError):
        assert f"\n## {one.__name__}\n" in ERRORS


@pytest.mark.parametrize("message", MESSAGE.findall(ERRORS))
def test_each_quoted_message_is_one_of_the_code(message: str) -> None:
    assert is_printed(message)


def test_a_message_that_the_code_does_not_have_is_found() -> None:
    assert len(MESSAGE.findall(ERRORS)) > 30
    assert is_printed("Step ... holds no tensor ...")
    assert not is_printed("Step ... has no tensor ...")
