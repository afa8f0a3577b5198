"""The text of a systemd unit, as systemd itself reads it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.jobs.service.boot_command import make_boot_command
from holdfast.jobs.service.systemd import unit_text

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def verify(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test.service").write_text(text)
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    return subprocess.run(
        ["systemd-analyze", "--user", "verify", str(folder / "test.service")],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["plain", "a b", "50% %h", "$x \"q\" 'q'", "back\\slash\\", "ümläut"])
def test_systemd_accepts_the_unit_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"relative:/{name}")
    done = verify(tmp_path, unit_text(make_boot_command(tmp_path / name)))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_unit_that_is_wrong_is_found(tmp_path: Path) -> None:
    text = unit_text(make_boot_command(tmp_path / "50%"))
    assert verify(tmp_path, text.replace('"holdfast.cli"', '"holdfast.cli')).stderr
    assert verify(tmp_path, text.replace("/usr/bin/env", "/nowhere")).returncode
