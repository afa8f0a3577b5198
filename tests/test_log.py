"""Logging: plain lines on stderr by default, and the standard configuration of `logging` otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

LINES = (
    "from holdfast.system.log import get_logger\n"
    "get_logger('checkpoint.run').info('restored step %d', 5)\n"
    "get_logger('watch.preemption').warning('cannot reach the cloud')\n"
    "get_logger('keeper').debug('details')\n"
)


RESTORED, CLOUD = "holdfast: restored step 5", "holdfast: cannot reach the cloud"


def stderr_of(code: str) -> list[str]:
    """Return the lines that a program writes to stderr."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("", [RESTORED, CLOUD]),
        ("logging.getLogger('holdfast').setLevel(logging.WARNING)\n", [CLOUD]),
        ("logging.getLogger('holdfast.watch.preemption').setLevel(logging.ERROR)\n", [RESTORED]),
        ("logging.getLogger('holdfast').addHandler(logging.NullHandler())\n", []),
        (
            "logging.basicConfig(format='%(levelname)s %(name)s - %(message)s')\n",
            [
                "INFO holdfast.checkpoint.run - restored step 5",
                "WARNING holdfast.watch.preemption - cannot reach the cloud",
            ],
        ),
        ("logging.getLogger('holdfast').setLevel(logging.DEBUG)\n", [RESTORED, CLOUD, "holdfast: details"]),
    ],
    ids=["default", "level", "level of a room", "null handler", "root", "debug"],
)
@pytest.mark.parametrize("is_imported_first", [False, True])
def test_lines_are_plain_silenced_or_routed(setup: str, expected: list[str], is_imported_first: bool) -> None:
    before, after = ("import holdfast.system.log\n", setup) if is_imported_first else (setup, "")
    assert stderr_of(f"import logging\n{before}{after}{LINES}") == expected


def test_stderr_is_looked_up_for_each_line() -> None:
    """Notebooks and tests replace it."""
    code = (
        "import contextlib, io, sys\n"
        "from holdfast.system.log import get_logger\n"
        "with contextlib.redirect_stderr(io.StringIO()) as found:\n"
        "    get_logger('train').info('inside')\n"
        "assert found.getvalue() == 'holdfast: inside\\n'\n"
        "get_logger('train').info('outside')\n"
        "sys.stderr = None\n"
        "get_logger('train').info('nowhere')\n"
    )
    assert stderr_of(code) == ["holdfast: outside"]


def test_a_file_as_stderr_has_times() -> None:
    (line,) = stderr_of(
        "from holdfast.system.log import get_logger, write_times\n"
        "write_times()\n"
        "get_logger('writeback').info('started')\n"
    )
    date, time, rest = line.split(" ", 2)
    assert (len(date), len(time), rest) == (10, 8, "holdfast: started")
