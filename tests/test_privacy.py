"""Other users of a machine, as real users: they can neither read, attach, plant nor deny anything."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import holdfast
from holdfast.checkpoint.keeper import lockfile
from holdfast.errors import Unsupported
from holdfast.system import privacy
from holdfast.watch.compiled import directory

STRANGER, OTHER = 65531, 65532
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
LIMIT_S = 600


def _as(user: int, code: str, *arguments: object) -> str:
    """Run Python code as another real user, without any of our groups; return what it prints."""
    become = f"import glob, os, socket, stat, sys\nos.setgroups([]); os.setgid({user}); os.setuid({user})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", become + code, *map(str, arguments)],
        cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /tmp: everybody may make files, nobody may remove another's."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            mode = stat.S_IMODE(parent.stat().st_mode)
            if not mode & stat.S_IXOTH:
                parent.chmod(mode | stat.S_IXOTH)
    folder.chmod(0o1777)
    return folder


_MAKE = {
    "folder": "os.mkdir(sys.argv[1], 0o777); os.chmod(sys.argv[1], 0o777)",
    "file": "open(sys.argv[1], 'w').close()",
    "link": "os.symlink(os.path.dirname(sys.argv[1]) + '/elsewhere', sys.argv[1])",
    "fifo": "os.mkfifo(sys.argv[1], 0o666)",
}


@as_root
@pytest.mark.parametrize("kind", _MAKE)
def test_a_folder_that_another_user_made_first_is_not_used(shared: Path, kind: str) -> None:
    wanted = shared / "holdfast-0"
    (shared / "elsewhere").mkdir()
    _as(STRANGER, _MAKE[kind], wanted)
    found = privacy.private_folder(wanted)
    assert found != wanted
    assert privacy.is_private(found)
    assert found == privacy.private_folder(wanted), "the same for the whole process"
    assert list((shared / "elsewhere").iterdir()) == []


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    assert not privacy.make_private(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "private")
    assert privacy.make_private(tmp_path / "private")
    assert not privacy.make_private(tmp_path / "link")


@as_root
@pytest.mark.parametrize("kind", _MAKE)
def test_a_runtime_folder_that_another_user_made_first_denies_no_training(
    shared: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make /tmp/holdfast-UID before its user's first training."""
    first, second = shared / "holdfast-0", shared / "second"
    _as(STRANGER, _MAKE[kind], first)
    monkeypatch.delenv("HOLDFAST_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(lockfile, "_places", lambda: (first, second))
    home = shared.parent / "home"
    with holdfast.Checkpointer(home, {"w": torch.ones(3)}, quiet=True) as ckpt:
        ckpt.save(1).wait_durable()
        assert list(second.rglob("*.lock"))
    assert holdfast.open(home).step == 1
    monkeypatch.setattr(lockfile, "_places", lambda: (first,))
    with pytest.raises(Unsupported, match="HOLDFAST_RUNTIME_DIR"):
        lockfile.runtime_dir("x")


def test_a_file_as_runtime_folder_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(Unsupported, match="only you can change"):
        lockfile.runtime_dir("x")


_SPY = """
found = []
for folder, names, files in os.walk(sys.argv[1]):
    found += files
for name in glob.glob(sys.argv[1] + '/*/*') + glob.glob(f'/proc/{sys.argv[2]}/fd/*'):
    found.append(name)
for pid in sys.argv[2:]:
    for name in ('mem', 'environ', 'maps'):
        try:
            open(f'/proc/{pid}/{name}', 'rb').read(1)
            found.append(name)
        except OSError:
            pass
for line in open('/proc/net/unix'):
    name = line.split()[-1]
    if '@' in name and 'holdfast' in name:
        found.append(name)
for name in sys.argv[1:2]:
    try:
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(name + '/held')
        found.append('connected')
    except OSError:
        pass
print(found)
"""


@as_root
@pytest.mark.parametrize("user", [STRANGER, OTHER])
def test_strangers_see_nothing_of_a_keeper(shared: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock files, sockets, memory and environment: a keeper has files that only its user may open."""
    folder = shared / "runtime"
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-value")
    with holdfast.Checkpointer(shared.parent / "home", {"w": torch.ones(3)}, quiet=True) as ckpt:
        ckpt.save(1).wait_durable()
        lock_files = list(folder.rglob("*.lock"))
        assert lock_files
        children = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        ]
        (keeper,) = [one.pid for one in children if "holdfast.checkpoint.keeper" in one.cmdline()]
        assert _as(user, _SPY, folder, keeper) == "[]\n"
        words = Path(f"/proc/{keeper}/cmdline").read_bytes()
        assert b"hidden-value" not in words
        assert b"hidden-value" not in b"".join(path.read_bytes() for path in lock_files)


@as_root
def test_headers_of_another_users_folder_do_not_travel(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight files of a folder that somebody had linked as /tmp/torchinductor_USER landed in a home."""
    secrets, usual = shared.parent / "secrets", shared / "torchinductor_root"
    secrets.mkdir()
    (secrets / "id_rsa").write_text("secret")
    mine = shared.parent / "mine"
    mine.mkdir()
    (mine / "code").write_text("x")
    make = "os.mkdir(sys.argv[1]); os.symlink(sys.argv[2], sys.argv[1] + '/precompiled_headers')"
    _as(STRANGER, make, usual, secrets)
    monkeypatch.setenv(directory.VARIABLE, str(mine))
    module = __import__("importlib").import_module("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.setattr(module, "default_cache_dir", lambda: str(usual))
    found = directory.current()
    assert found is not None
    assert set(directory.whole_files(found)) == {"code"}
    monkeypatch.setenv(directory.VARIABLE, str(usual))
    assert directory.current() is None, "the usual folder itself is another user's"


@as_root
def test_a_planted_file_is_not_the_latest_checkpoint(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_latest_checkpoint_path` returned whatever stood at a predictable path below TMPDIR."""
    import holdfast.adapters.nebula as nm
    from holdfast.adapters.nebula import interface
    from holdfast.adapters.nebula.interface import end

    monkeypatch.setattr("tempfile.tempdir", str(shared))
    home = shared.parent / "home"
    nm.init(str(home))
    try:
        checkpoint = nm.Checkpoint("global_step1", -2)
        checkpoint.save("model", {"w": torch.ones(3)})
        checkpoint.commit()
        nm.flush_persistence()
        run = holdfast.open(home).manifest.run
        plant = (
            "place = f'{sys.argv[1]}/exports/{sys.argv[2]}/a0001-step1'\n"
            "os.makedirs(place)\n"
            "for name in ('model', 'checkpoint'):\n"
            "    open(f'{place}/{name}', 'w').write('planted')\n"
            "os.chmod(sys.argv[1], 0o755)\n"
        )
        _as(STRANGER, plant, shared / "holdfast-0", run)
        path = Path(interface.get_latest_checkpoint_path("model"))
        assert path.stat().st_uid == os.geteuid()
        assert privacy.is_private(path.parent)
        assert torch.load(path, weights_only=True)["w"].tolist() == [1, 1, 1]
    finally:
        end()
