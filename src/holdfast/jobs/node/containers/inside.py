"""Calls inside of a container, by processes that join its namespaces for one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.errors import Conflict, RetryLater
from holdfast.system.linux.joined_namespaces import JoinedNamespaces

_PASSWD = Path("/etc/passwd")
_MAX_PASSWD_BYTES = 1 << 20
_DONE, _FAILED = b"+", b"-"


def find_home(namespaces: JoinedNamespaces, user: str) -> str:
    """Return the home of a user of an image. By default, it is /.

    Args:
        user: name or number, with or without a group after a colon. Empty is root.

    Raises:
        RetryLater: the container cannot be entered.
    """
    name = user.partition(":")[0] or "0"

    def look() -> str:
        try:
            with _PASSWD.open(errors="replace") as file:
                lines = file.read(_MAX_PASSWD_BYTES).splitlines()
        except OSError:
            return ""
        rows = [line.split(":") for line in lines]
        return next((row[5] for row in rows if len(row) > 5 and name in (row[0], row[2])), "")

    return _call(namespaces, look) or ("/root" if name in ("0", "root") else "/")


def make_links(namespaces: JoinedNamespaces, links: Mapping[str, str]) -> None:
    """Create symbolic links in a container. They replace files and empty folders of the image.

    Args:
        links: absolute paths of the files, by that of the link.

    Raises:
        Conflict: the image has a folder with files at the path of a link.
        RetryLater: the container cannot be entered, or a link cannot be created.
    """

    def make() -> str:
        for target, source in links.items():
            path = Path(target)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.exists():
                try:
                    path.rmdir()
                except OSError:
                    return target
            path.symlink_to(source)
        return ""

    if covered := _call(namespaces, make):
        raise Conflict(
            f"file_mounts: the image has a folder with files at {covered}, which was not changed. Choose "
            "another path for the mount."
        )


def own_files(namespaces: JoinedNamespaces, folder: Path) -> None:
    """Make root inside, which is the user outside, the owner of all files.

    Only files of other users inside are changed, as `tar` creates them for root.

    Raises:
        RetryLater: the container cannot be entered.
    """

    def change() -> str:
        for parent, folders, names in os.walk(folder):
            for path in (parent, *(os.path.join(parent, name) for name in (*folders, *names))):  # noqa: PTH118
                try:
                    if os.lstat(path).st_uid != 0:
                        os.lchown(path, 0, 0)
                except OSError:
                    continue  # of a user who does not exist inside, or removed meanwhile
        return ""

    _call(namespaces, change)


def _call(namespaces: JoinedNamespaces, function: Callable[[], str]) -> str:
    """Return the result of a function that a process inside calls. It must not import anything."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = _FAILED
        try:
            namespaces.join()
            answer = _DONE + os.fsencode(function())
        except OSError as error:
            answer = _FAILED + os.fsencode(str(error))
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    text = os.fsdecode(answer[1:])
    if not answer.startswith(_DONE):
        raise RetryLater(f"Cannot change the container of the job: {text or 'its process was killed'}.")
    return text
