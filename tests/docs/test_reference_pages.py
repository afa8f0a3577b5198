"""The page of settings: it has all that the code has, and nothing else."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "holdfast"
SETTINGS = (ROOT / "docs" / "settings.md").read_text()

OURS = re.compile(r"HOLDFAST_[A-Z_]*[A-Z]")
INTERNAL = {
    "HOLDFAST_KILL_AT": "kills a process at a failpoint, in tests of crashes only",
    "HOLDFAST_KILL_MARK": "file that such a kill makes, in tests of crashes only",
    "HOLDFAST_PATH": "end of _HOLDFAST_PATH, in the script that a shell leaves a job's environment by",
    "HOLDFAST_SANDBOX": "folder of the homes of a dry run; check, replay and tune set it",
    "HOLDFAST_TRIAL": "plan of a run for check and replay, which set it",
    "HOLDFAST_WATCH": "watch of a run for check and replay, which set it",
}
"""Variables that no user sets and no job receives, with the reason."""

READ = re.compile(r"""(?:\bos\.environ(?:\.get\(|\[)|\bread_integer\()["']([A-Z][A-Z0-9_]*)["']""")
OF_SHELLS = {"COMP_LINE": "the line that a shell completes; argcomplete's protocol"}


@cache
def source() -> str:
    """The text of the package: its Python and shell scripts."""
    return "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".sh"))


def settings() -> set[str]:
    """Variables that have a row on the page of settings."""
    cells = re.findall(r"^\| (`[^|]+) \|", SETTINGS, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([A-Za-z_0-9]+)`", cell)} - {"envs"}


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
