"""Workdir of a job: each node's own copy of a folder or a clone of a repository, or an empty folder."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

from holdfast.errors import NotFound, RetryLater, Unsupported, redact
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.copies import Ignore, check_copy, copy_tree, left_out
from holdfast.jobs.task.model import Repository, Task
from holdfast.system.documents import decode_text
from holdfast.system.linux.program_runs import Ended, run_program

_LIMIT_S = 1800.0
_TAIL = 1000
_SKYIGNORE = ".skyignore"
_LIST_LIMIT_S = 60.0
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


def check_workdir(task: Task) -> None:
    """Check that the workdir can be created."""
    where = task.where("workdir")
    if task.repository is not None and shutil.which("git") is None:
        raise Unsupported(
            f"{where}: git is not installed on this machine (`apt-get install git`). Nothing was started."
        )
    if task.workdir is not None and not Path(task.workdir).is_dir():
        raise NotFound(f"{where}: the folder {task.workdir} does not exist. Nothing was started.")


def create_workdir(task: Task, folder: JobFolder) -> None:
    """Create a workdir for every node."""
    source = Path(task.workdir) if task.workdir is not None else None
    ignore = left_out_of_workdir(source, folder) if source is not None else None
    if source is not None and ignore is not None:
        way_out = "Leave files out with a line in .skyignore or .gitignore, or mount them with file_mounts."
        what = task.where("workdir")
        check_copy(source, ignore, task.envs, num_copies=task.num_nodes, what=what, way_out=way_out)
    for rank in range(task.num_nodes):
        to = folder.workdir(rank)
        to.parent.mkdir(parents=True, exist_ok=True)
        if task.repository is not None and rank == 0:
            commit = clone(task.repository, to)
            with folder.log(0).open("a") as log:
                log.write(f"holdfast: workdir is {redact(task.repository.url)} at commit {commit}\n")
        elif task.repository is not None:
            copy_tree(folder.workdir(0), to)
        elif source is not None:
            copy_tree(source, to, ignore)
        else:
            to.mkdir()


def left_out_of_workdir(source: Path, job: JobFolder) -> Ignore:
    """Return a function that names what a copy of a workdir does not contain."""
    ignored, is_left_out = ignored_paths(source), left_out(job)

    def ignore(folder: str, names: list[str]) -> list[str]:
        here = Path(folder).relative_to(source)
        return [*is_left_out(folder, names), *(name for name in names if str(here / name) in ignored)]

    return ignore


def clone(repository: Repository, to: Path) -> str:
    """Clone a repository with its history into a folder, and return the commit."""
    _git("clone", "--no-checkout", "--", repository.url, str(to), about=repository)
    commit = _commit(repository, to)
    _git("-C", str(to), "checkout", "--quiet", *_how(repository, to, commit), about=repository)
    _git("-C", str(to), "submodule", "update", "--init", "--recursive", about=repository)
    return commit


def _commit(repository: Repository, to: Path) -> str:
    """Return the commit of the ref. A branch takes precedence over a tag, as in `git clone --branch`."""
    ref = repository.ref
    names = ["HEAD"] if ref is None else [f"refs/remotes/origin/{ref}", f"refs/tags/{ref}", ref]
    for name in names:
        found = _run(
            "-C", str(to), "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        )
        if found.status == 0:
            return found.text
    if ref is not None and _run("-C", str(to), "fetch", "--quiet", "origin", "--", ref).status == 0:
        # A commit that is not on any branch, or a ref of another kind, such as a pull request's.
        return _git("-C", str(to), "rev-parse", "FETCH_HEAD^{commit}", about=repository)
    what = "branch, tag or commit " + repr(ref) if ref is not None else "commit"
    raise NotFound(f"{repository.url} has no {what}. Nothing was started.")


def _how(repository: Repository, to: Path, commit: str) -> list[str]:
    """Return arguments that check out the branch by name if possible, else the commit."""
    ref = repository.ref
    if ref is None:
        return ["HEAD", "--"] if _run("-C", str(to), "symbolic-ref", "-q", "HEAD").status else []
    is_branch = _run("-C", str(to), "rev-parse", "-q", "--verify", f"refs/remotes/origin/{ref}").status == 0
    return ["-B", ref, f"origin/{ref}", "--"] if is_branch else ["--detach", commit, "--"]


def _git(*words: str, about: Repository) -> str:
    done = _run(*words)
    if done.status:
        raise RetryLater(
            f"Cannot clone {about.url}: git reports: {done.error[-_TAIL:]}. Nothing was "
            "started. git uses its own credentials: a credential helper, or ssh's agent."
        )
    return done.text


def _run(*words: str, timeout_s: float = _LIMIT_S, **variables: str) -> Ended:
    # No user is present to enter a password.
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **variables}
    environment.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")
    command = ["git", "-c", "protocol.ext.allow=never", *words]
    return run_program(command, timeout_s=timeout_s, env=environment)


def ignored_paths(folder: Path) -> frozenset[str]:
    """Return the paths below a folder to leave out. An ignored folder is listed without its contents.

    An existing `.skyignore` replaces git's rules. Each of its lines is a pattern, relative to the folder if
    it starts with a slash, else to any folder below. Lines with `#` are comments. Otherwise git's rules apply
    if the folder is in a work tree. Files that git tracks are always copied.

    Source: skypilot 0.14.1, sky/data/storage_utils.py, so that SkyPilot and Holdfast copy the same files.
    """
    if (path := folder / _SKYIGNORE).is_file():
        return _by_patterns(folder, decode_text(path.read_bytes(), str(path)))
    return _by_git(folder)


def _by_patterns(folder: Path, text: str) -> frozenset[str]:
    found = set()
    for line in map(str.strip, text.splitlines()):
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
        names = _git_files(folder / module, *_IGNORED)
        if names is None:
            continue  # not a work tree
        for name in names:
            if not module and name == "./":
                return frozenset()  # an outer repository ignores the whole folder, which cannot be intended
            found.add(os.path.normpath(Path(module, name)))
        rows = _git_files(folder / module, "--stage") or []
        links = [str(Path(module, row.partition("\t")[2])) for row in rows if row.startswith(_GITLINK)]
        pending += [name for name in links if (folder / name / ".git").exists()]
    return frozenset(found)


def _git_files(folder: Path, *options: str) -> list[str] | None:
    """Return the files that git lists, or None if the folder is not in a work tree."""
    words = (*_NO_PROGRAMS, "-C", str(folder), "ls-files", "-z", *options)
    done = _run(*words, timeout_s=_LIST_LIMIT_S, GIT_OPTIONAL_LOCKS="0", GIT_NO_LAZY_FETCH="1")
    if done.status and ("not a git repository" in done.error or "work tree" in done.error):
        return None
    if done.status:
        raise RetryLater(
            f"git could not list the ignored files of {folder}: {done.error}. Add a .skyignore file to avoid "
            "git."
        )
    return [os.fsdecode(name) for name in done.out.split(b"\0") if name]
