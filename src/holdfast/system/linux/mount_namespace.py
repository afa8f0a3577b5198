"""Namespaces without root: other entries for one process and its children, and those of a process joined."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from holdfast.system.linux.partial_files import temporary_folder

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # flags of unshare(2) and setns(2)
_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT = 1, 2, 4, 32  # flags of mount(2)
_BIND, _MOVE, _RECURSIVE, _SLAVE = 1 << 12, 1 << 13, 1 << 14, 1 << 19
_DETACH = 2  # flag of umount2(2)
_ROOT = Path("/")
_MAX_ENTRIES = 2000
_UNREACHABLE = {errno.ENOENT, errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN}
"""Error numbers of an entry that cannot be used outside of the namespace either."""


def enter() -> None:
    """Move this process, of one thread, to a mount namespace of its own.

    Mounts that are made outside later appear in it where the system shares them; none leaves it. Other users
    than root also enter a user namespace, in which they keep their ids and all others are `nobody`: programs
    that change their user, such as sudo, fail.

    Source: mount_namespaces(7), user_namespaces(7).
    """
    if os.geteuid() != 0 or _libc().unshare(_NEW_MOUNTS) != 0:
        user, group = os.geteuid(), os.getegid()
        _check(_libc().unshare(_NEW_USER | _NEW_MOUNTS))
        own = Path("/proc/self")
        (own / "setgroups").write_text("deny")
        (own / "uid_map").write_text(f"{user} {user} 1")
        (own / "gid_map").write_text(f"{group} {group} 1")
    _mount(None, _ROOT, _RECURSIVE | _SLAVE)


def add_links(directory: Path, links: Mapping[str, str], staging: Path) -> None:
    """Cover a directory with one that has further links, in this namespace.

    Entries are shared with the directory. None can be added, and those that others add later do not appear.

    Args:
        links: targets of the links, by path relative to the directory. They replace entries of that name.
        staging: empty directory.
    """
    with os.scandir(directory) as found:
        entries = [entry for entry in found if entry.name not in links]
    if len(entries) > _MAX_ENTRIES:
        raise OSError(errno.E2BIG, f"it has more than {_MAX_ENTRIES} entries", str(directory))
    _mount("holdfast", staging, _NO_SUID | _NO_DEVICES, kind="tmpfs", options="mode=0755")
    for entry in entries:
        _share(entry, staging / entry.name)
    for name, target in links.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).symlink_to(target)
    _mount(None, staging, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    if directory == _ROOT:
        _become_root(staging)
    else:
        _mount(str(staging), directory, _MOVE)


def _share(entry: os.DirEntry[str], path: Path) -> None:
    if entry.is_symlink():
        return path.symlink_to(os.readlink(entry.path))  # noqa: PTH115 - a Path drops a slash at the end
    if entry.is_dir(follow_symlinks=False):
        path.mkdir()
    else:
        path.touch()
    try:
        _mount(entry.path, path, _BIND | _RECURSIVE)
    except OSError as error:
        if error.errno not in _UNREACHABLE:
            raise
    return None


def _become_root(folder: Path) -> None:
    """Make a mounted folder the root, and detach the old one.

    Source: pivot_root(2), for a new root that is also the place of the old one.
    """
    os.chdir(folder)
    _check(_libc().pivot_root(b".", b"."))
    _check(_libc().umount2(b".", _DETACH))
    os.chdir(_ROOT)
    # A copy of it is among the entries, if its path is below one; otherwise this fails.
    _libc().umount2(os.fsencode(folder), _DETACH)


def _mount(source: str | None, path: Path, flags: int, kind: str | None = None, options: str = "") -> None:
    place = None if source is None else os.fsencode(source)
    name = None if kind is None else kind.encode()
    flag_word = ctypes.c_ulong(flags)
    _check(_libc().mount(place, os.fsencode(path), name, flag_word, options.encode()), str(path))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, path: str | None = None) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


class JoinedNamespaces(Struct, frozen=True):
    """Descriptors of namespaces, which keep them alive."""

    user: int | None  # None: that of this process
    mounts: int

    def close(self) -> None:
        """Release the namespaces."""
        for fd in (self.user, self.mounts):
            if fd is not None:
                os.close(fd)

    def join(self) -> None:
        """Move this process, of one thread, to the namespaces, as their root.

        Its current directory becomes their root directory.

        Source: setns(2), user_namespaces(7).
        """
        if self.user is not None:
            _check(_libc().setns(self.user, _NEW_USER), "setns")
        _check(_libc().setns(self.mounts, _NEW_MOUNTS), "setns")
        # Further groups are kept: files outside that are shared with a group stay accessible.
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def open_namespaces(pid: int) -> JoinedNamespaces:
    """Open the namespaces of a process."""
    of_process = Path(f"/proc/{pid}/ns")
    is_own = (of_process / "user").stat().st_ino == Path("/proc/self/ns/user").stat().st_ino
    user = None if is_own else os.open(of_process / "user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return JoinedNamespaces(user, os.open(of_process / "mnt", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        if user is not None:
            os.close(user)
        raise


def main() -> None:
    """Try everything once, and exit with status 1 and the reason if it fails."""
    with temporary_folder("mounts") as staging:
        child = os.fork()
        if child == 0:
            try:
                enter()
                add_links(_ROOT, {"holdfast-trial": "/"}, staging)
                Path("/holdfast-trial").readlink()
            except OSError as error:
                sys.stderr.write(f"{error}\n")
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
