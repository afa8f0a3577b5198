"""Workdir of a job: each node's own copy, clone of a repository or empty folder; copies of files for jobs.

Copies are limited in size, with holes kept, and blocks shared where possible.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from holdfast.errors import Denied, InvalidInput, NotFound, RetryLater, Unsupported, redact
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.task.model import Repository, Task
from holdfast.system.documents import decode_text
from holdfast.system.linux.program_runs import Ended, run_program
from holdfast.system.log import get_logger
from holdfast.system.units import format_bytes, parse_bytes, plural, some

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


LIMIT = "HOLDFAST_COPY_LIMIT"
"""Variable of the task or the shell with the most bytes that one copy may take on all nodes, or `none`."""
_DEFAULT = "10GiB"
_SHOWN_BYTES = 1 << 30  # size from which a copy is announced before it begins
_NUM_SHOWN = 3
_CHUNK_BYTES = 8 << 20

Ignore = Callable[[str, list[str]], Iterable[str]]

_log = get_logger("jobs")


def check_copy(
    source: Path, ignore: Ignore, envs: Mapping[str, str], *, num_copies: int, what: str, way_out: str
) -> None:
    """Check that a file or folder can be copied, and announce a long copy.

    Messages call it `what`, and end with `way_out`, how to copy less.
    """
    num_files = total = most = 0
    largest, unreadable = source, list[str]()
    for path in _files(source, ignore, unreadable):
        status = path.lstat()
        if not path.is_symlink() and not os.access(path, os.R_OK):
            unreadable.append(str(path))
        num_bytes = min(status.st_size, status.st_blocks * 512)  # without holes
        num_files, total = num_files + 1, total + num_bytes
        if num_bytes > most:
            largest, most = path, num_bytes
    if unreadable:
        raise Denied(
            f"{what}: this user cannot read {some(unreadable, _NUM_SHOWN)}. Change the permissions. "
            f"{way_out} Nothing was started."
        )
    copies = f"{format_bytes(total)} in {plural(num_files, 'file')}"
    copies += f", copied {num_copies} times" if num_copies > 1 else ""
    text = envs.get(LIMIT) or os.environ.get(LIMIT) or _DEFAULT
    limit = None if text.strip().lower() == "none" else parse_bytes(text, LIMIT)
    size = f"{what}: {source} has {copies}. The largest file is {largest} ({format_bytes(most)})."
    if limit is not None and total * num_copies > limit:
        raise InvalidInput(
            f"{size} The limit is {format_bytes(limit)}. {way_out} Or set {LIMIT} in `envs` to another "
            "limit, or to none. Nothing was started."
        )
    if total * num_copies >= _SHOWN_BYTES:
        _log.info("%s This may take minutes. %s", size, way_out)


def left_out(job: JobFolder) -> Callable[[str, list[str]], list[str]]:
    """Return a function for `shutil.copytree` that names what no copy for a job contains.

    That is sockets, pipes and devices, and the state of all jobs: the copy is in there, and would contain
    itself, and the secrets of other jobs.
    """
    own = {path.resolve() for path in (job.path, job.path.parent, job.path.parent.parent)}
    own_names = {path.name for path in own}

    def ignore(folder: str, names: list[str]) -> list[str]:
        paths = {name: Path(folder, name) for name in names}
        return [
            name
            for name, path in paths.items()
            if not (path.is_symlink() or path.is_dir() or path.is_file())
            or (name in own_names and path.resolve() in own)
        ]

    return ignore


def copy_tree(source: Path, to: Path, ignore: Ignore | None = None) -> None:
    """Copy a folder with symbolic links as they are."""
    try:
        shutil.copytree(source, to, symlinks=True, ignore=ignore, copy_function=copy_file)
    except shutil.Error as error:
        failed = [f"{one[0]}: {one[2]}" for one in error.args[0]]
        raise OSError(errno.EIO, f"could not copy {some(failed, _NUM_SHOWN)}") from None


def copy_file(source: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Copy a regular file with its permissions and times. Its blocks are shared if possible."""
    if not stat.S_ISREG(Path(source).stat().st_mode):  # `is_file` is False also for what has vanished
        _log.info("%s is a socket, a pipe or a device, and was not copied.", source)
        return
    with Path(source).open("rb") as read, Path(to).open("wb") as written:
        _copy_data(read.fileno(), written.fileno())
    shutil.copystat(source, to)


def _copy_data(read: int, written: int) -> None:
    """Copy what is not a hole."""
    end = os.fstat(read).st_size
    os.ftruncate(written, end)
    offset = 0
    while offset < end:
        try:
            offset = os.lseek(read, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                return
            raise
        data_end = min(os.lseek(read, offset, os.SEEK_HOLE), end)
        while offset < data_end:
            num_bytes = _copy_some(read, written, offset, data_end - offset)
            if not num_bytes:  # it was shortened meanwhile
                os.ftruncate(written, offset)
                return
            offset += num_bytes


def _copy_some(read: int, written: int, offset: int, most: int) -> int:
    """Copy some bytes, by sharing their blocks where the file system can, and return their number."""
    with contextlib.suppress(OSError, AttributeError):  # between file systems, or on an old C library
        if num_bytes := os.copy_file_range(read, written, most, offset, offset):
            return num_bytes
    return os.pwrite(written, os.pread(read, min(most, _CHUNK_BYTES), offset), offset)


def _files(source: Path, ignore: Ignore, unreadable: list[str]) -> Iterator[Path]:
    """Yield the files of a copy. Folders that cannot be read are appended to `unreadable`."""
    if not source.is_dir():
        yield source
        return
    for folder, folders, names in os.walk(source, onerror=lambda error: unreadable.append(error.filename)):
        left_out = set(ignore(folder, [*folders, *names]))
        folders[:] = [name for name in folders if name not in left_out]
        yield from (Path(folder, name) for name in names if name not in left_out)
