"""Servers for tests listen when they are yielded, and exit with the process that started them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.errors import Unsupported
from holdfast.system.linux.processes import read_stat
from servers import azurite, install_azurite, ministack


def test_a_server_listens_and_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")
    with ministack() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        store = open_store(server.home("run"))
        store.put("a", b"x")
        assert open_store(server.home("run")).get("a") == b"x"
        assert read_stat(server.pid)
    assert read_stat(server.pid) is None


SCRIPT = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from servers import ministack
with ministack() as server:
    print(server.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_does_not_outlive_a_killed_test() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([fd], [], [], 60)
        assert ended
    finally:
        os.close(fd)


def test_a_missing_azurite_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_AZURITE", str(tmp_path))
    with pytest.raises(Unsupported, match="install_azurite"), azurite():
        pass


def test_an_unusable_folder_of_azurite_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_TEST_AZURITE", str(tmp_path / "file" / "below"))
    with pytest.raises(Unsupported, match="cannot be installed into"):
        install_azurite()
