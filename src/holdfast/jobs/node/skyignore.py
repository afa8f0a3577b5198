"""Files of a workdir that are not copied, from `.skyignore` or git's ignore rules."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from pathlib import Path

from holdfast.errors import RetryLater
from holdfast.system.documents import decode_text
from holdfast.system.linux.program_runs import run_program

_SKYIGNORE = ".skyignore"
_LIMIT_S = 60.0
_IGNORED = ("--others", "--ignored", "--exclude-standard", "--directory")
_GITLINK = "160000 "
# The folder may be another user's, and its .git/config may name programs for git to run.
_NO_PROGRAMS = (
    *("-c", "core.fsmonitor="),
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", "core.pager=cat"),
    *("-c", "core.sshCommand=false"),
    *("-c", "protocol.allow=never"),
)


def ignored_paths(folder: Path) -> frozenset[str]:
    """Return the paths below a folder to leave out. An ignored folder is listed without its contents.

    An existing `.skyignore` replaces git's rules. Each of its lines is a pattern, relative to the folder if
    it starts with a slash, else to any folder below. Lines with `#` are comments. Otherwise git's rules apply
    if the folder is in a work tree. Files that git tracks are always copied.

    Raises:
        RetryLater: git failed.
        InvalidInput: the `.skyignore` is not UTF-8.

    Source: skypilot 0.14.1, sky/data/storage_utils.py, so that SkyPilot and Holdfast copy the same files.
    """
    if (folder / _SKYIGNORE).is_file():
        path = folder / _SKYIGNORE
        return _by_patterns(folder, decode_text(path.read_bytes(), str(path)))
    return _by_git(folder)


def _by_patterns(folder: Path, text: str) -> frozenset[str]:
    found = set()
    lines = [line.strip() for line in text.splitlines()]
    for line in lines:
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("/") if line.startswith("/") else f"**/{line}"
        # Path.glob would also match names that start with a dot, unlike SkyPilot.
        found.update(glob.glob(pattern, root_dir=folder, recursive=True))  # noqa: PTH207
    return frozenset(os.path.normpath(path) for path in found)


def _by_git(folder: Path) -> frozenset[str]:
    if shutil.which("git") is None:
        return frozenset()
    found: set[str] = set()
    pending = [""]  # the folder, and submodules below it
    while pending:
        module = pending.pop()
        names = _git(folder / module, "ls-files", "-z", *_IGNORED)
        if names is None:
            continue  # not a work tree
        for name in names:
            if not module and name == "./":
                return frozenset()  # an outer repository ignores the whole folder, which cannot be intended
            found.add(os.path.normpath(Path(module, name)))
        pending += [name for name in _submodules(folder, module) if (folder / name / ".git").exists()]
    return frozenset(found)


def _submodules(folder: Path, module: str) -> list[str]:
    rows = _git(folder / module, "ls-files", "-z", "--stage") or []
    return [str(Path(module, row.partition("\t")[2])) for row in rows if row.startswith(_GITLINK)]


def _git(folder: Path, *words: str) -> list[str] | None:
    """Return git's null-separated output, or None if the folder is not in a work tree."""
    environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    try:
        command = ["git", *_NO_PROGRAMS, "-C", str(folder), *words]
        done = run_program(command, timeout_s=_LIMIT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RetryLater(f"git did not answer within {_LIMIT_S:.0f} s in {folder}.") from error
    output = done.error
    if done.status and ("not a git repository" in output or "work tree" in output):
        return None
    if done.status:
        raise RetryLater(
            f"git could not list the ignored files of {folder}: {output}. Add a .skyignore file to avoid git."
        )
    return [os.fsdecode(name) for name in done.out.split(b"\0") if name]
