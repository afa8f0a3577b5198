"""Clone of a task's git repository at a branch, tag or commit, as its workdir."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from holdfast.errors import NotFound, RetryLater, Unsupported
from holdfast.jobs.task.model import Repository
from holdfast.system.linux.program_runs import Ended, run_program

_LIMIT_S = 1800.0
_TAIL = 1000


def check_git(where: str) -> None:
    """Check that git is installed.

    Raises:
        Unsupported: git is missing.
    """
    if shutil.which("git") is None:
        raise Unsupported(
            f"{where}: git is not installed on this machine (`apt-get install git`). Nothing was started."
        )


def clone(repository: Repository, to: Path) -> str:
    """Clone a repository with its history into a folder, and return the commit.

    Args:
        to: folder that does not exist yet.

    Raises:
        NotFound: the branch, tag or commit does not exist.
        RetryLater: git failed, for example because the repository is unreachable or needs credentials.

    Blocks: while git fetches the repository.
    """
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


def _run(*words: str) -> Ended:
    # No user is present to enter a password.
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    environment.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")
    try:
        command = ["git", "-c", "protocol.ext.allow=never", *words]
        return run_program(command, timeout_s=_LIMIT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RetryLater(f"git did not finish within {_LIMIT_S:.0f} s: git {' '.join(words)}.") from error
