"""Mount namespaces, entered by real processes of this user and, as root, of another one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.system.linux.mount_namespace import add_links, enter
from jobs.harness import needs_namespaces
from programs import run_python

STRANGER = 65531
PR_SET_DUMPABLE = 4
USERS = [
    pytest.param(None, id="this user"),
    pytest.param(
        STRANGER,
        id="another user",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
    ),
]
pytestmark = needs_namespaces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that any user can enter."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return tmp_path


def in_child(user: int | None, work: Callable[[], None]) -> None:
    """Run `work` in a process of its own, as a user; fail as it does."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
                # As an exec does: otherwise /proc/self belongs to root.
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            work()
        except BaseException:  # noqa: BLE001 - reported to the parent
            os.write(writing, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as report:
        text = report.read()
    assert os.waitpid(child, 0)[1] == 0, text


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def staging_in(folder: Path) -> Path:
    path = folder / "staging"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    return path


@pytest.mark.parametrize("user", USERS)
def test_a_link_below_the_root_exists_in_the_namespace_only(folder: Path, user: int | None) -> None:
    own, staging, name = folder / "own", staging_in(folder), f"holdfast-{os.getpid()}"
    own.mkdir()
    own.chmod(0o777)
    before = names_in(Path("/"))

    def work() -> None:
        ids = (os.geteuid(), os.getegid())
        enter()
        add_links(Path("/"), {name: str(own), f"{name}-deep/link": str(own)}, staging)
        Path("/", name, "file").write_text("from inside")
        assert Path(f"/{name}-deep/link/file").read_text() == "from inside"
        assert names_in(Path("/")) == before | {name, f"{name}-deep"}
        assert (os.geteuid(), os.getegid()) == ids
        with pytest.raises(OSError, match="Read-only"):
            Path(f"/{name}-further").touch()
        done = subprocess.run(
            ["bash", "-c", f"cat /{name}/file; grep CapEff /proc/self/status"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith("from inside")
        assert os.geteuid() == 0 or done.stdout.split()[-1] == "0" * 16, "commands have no privileges"

    in_child(user, work)
    assert (own / "file").read_text() == "from inside"
    assert names_in(Path("/")) == before
    assert str(staging) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize("user", USERS)
def test_entries_of_a_covered_directory_are_shared(folder: Path, user: int | None) -> None:
    covered, staging = folder / "covered", staging_in(folder)
    (covered / "writable").mkdir(parents=True)
    (covered / "writable").chmod(0o777)
    (covered / "a file\nof two lines").write_text("text")
    (covered / "closed").mkdir(mode=0o700)
    (covered / "link").symlink_to("writable/")
    (covered / "dangling").symlink_to("/nowhere/at/all")
    os.mkfifo(covered / "fifo")
    (covered / "empty").mkdir()
    covered.chmod(0o755)
    names = names_in(covered)

    def work() -> None:
        enter()
        add_links(covered, {"empty": "/usr", "new/deeper": "/usr"}, staging)
        assert names_in(covered) == names | {"new"}
        assert all((covered / name).readlink() == Path("/usr") for name in ("empty", "new/deeper"))
        assert os.readlink(covered / "link") == "writable/"  # noqa: PTH115 - a Path drops the slash
        assert (covered / "fifo").is_fifo()
        assert (covered / "a file\nof two lines").read_text() == "text"
        (covered / "link" / "from inside").write_text("bytes")
        with pytest.raises(OSError, match="Read-only"):
            (covered / "another").touch()

    in_child(user, work)
    assert names_in(covered) == names
    assert not (covered / "empty").is_symlink()
    assert (covered / "writable" / "from inside").read_text() == "bytes"


def test_a_directory_inside_of_another_is_covered_first(folder: Path) -> None:
    outer, staging = folder / "outer", staging_in(folder)
    (outer / "inner").mkdir(parents=True)

    def work() -> None:
        enter()
        add_links(outer / "inner", {"link": "/usr"}, staging)
        add_links(outer, {"link": "/etc"}, staging)
        assert (outer / "inner" / "link").readlink() == Path("/usr")
        assert (outer / "link").readlink() == Path("/etc")

    in_child(None, work)
    assert not os.path.lexists(outer / "inner" / "link")


def test_a_directory_with_very_many_entries_is_refused(folder: Path) -> None:
    crowded = folder / "crowded"
    crowded.mkdir()
    for number in range(2001):
        (crowded / str(number)).touch()

    def work() -> None:
        enter()
        with pytest.raises(OSError, match="more than 2000 entries"):
            add_links(crowded, {"link": "/usr"}, staging_in(folder))

    in_child(None, work)


def test_a_process_with_threads_can_try_it() -> None:
    code = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    code += "from holdfast.jobs.node.mounts.mount_records import why_unavailable\nprint(why_unavailable())"
    assert run_python(code) == "None"
