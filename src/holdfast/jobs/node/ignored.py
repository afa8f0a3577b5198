"""What of a workdir is not copied: what its `.skyignore` names, or without one what git ignores there."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from pathlib import Path

from holdfast.errors import RetryLater

_SKYIGNORE = ".skyignore"
_LIMIT_S = 60.0
_IGNORED = ("--others", "--ignored", "--exclude-standard", "--directory")
_GITLINK = "160000 "
# The folder may be somebody else's, and its .git/config may name programs for git to run.
_NO_PROGRAMS = (
    *("-c", "core.fsmonitor="),
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", "core.pager=cat"),
    *("-c", "core.sshCommand=false"),
    *("-c", "protocol.allow=never"),
)


def ignored(folder: Path) -> frozenset[str]:
    """Paths below a folder that are left out; of an ignored folder just itself.

    A `.skyignore` counts alone if it is there. Each of its lines is a pattern, from the folder itself if it
    begins with a slash, else from any folder below; lines with `#` are comments. Otherwise git is asked, if
    the folder is in a work tree: files that are tracked are copied, whatever `.gitignore` says.

    Raises:
        RetryLater: git failed.

    Source: skypilot 0.14.1, sky/data/storage_utils.py, so that the same files are copied here and there.
    """
    if (folder / _SKYIGNORE).is_file():
        return _by_patterns(folder, (folder / _SKYIGNORE).read_text(encoding="utf-8"))
    return _by_git(folder)


def _by_patterns(folder: Path, text: str) -> frozenset[str]:
    found = set()
    lines = [line.strip() for line in text.splitlines()]
    for line in lines:
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("/") if line.startswith("/") else f"**/{line}"
        # Not Path.glob, whose stars match names that begin with a dot, which SkyPilot's do not.
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
            continue  # no work tree
        for name in names:
            if not module and name == "./":
                return frozenset()  # all of it is ignored, by a repository around it: that cannot be meant
            found.add(os.path.normpath(Path(module, name)))
        pending += [name for name in _submodules(folder, module) if (folder / name / ".git").exists()]
    return frozenset(found)


def _submodules(folder: Path, module: str) -> list[str]:
    rows = _git(folder / module, "ls-files", "-z", "--stage") or []
    return [str(Path(module, row.partition("\t")[2])) for row in rows if row.startswith(_GITLINK)]


def _git(folder: Path, *words: str) -> list[str] | None:
    """What git says, apart at null bytes; None if the folder is in no work tree."""
    environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    try:
        done = subprocess.run(
            ["git", *_NO_PROGRAMS, "-C", str(folder), *words],
            capture_output=True,
            check=False,
            timeout=_LIMIT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise RetryLater(f"git did not answer within {_LIMIT_S:.0f} s in {folder}.") from error
    said = os.fsdecode(done.stderr).strip()
    if done.returncode and ("not a git repository" in said or "work tree" in said):
        return None
    if done.returncode:
        raise RetryLater(
            f"git could not say what is ignored in {folder}: {said}. A .skyignore file there counts instead."
        )
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
