"""The text of a systemd unit, as systemd itself reads it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.jobs.service import make_boot_command

NAMES = ["plain", "a b", "50% %h", "$x \"q\" 'q'", "back\\slash\\", "ümläut"]
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def verify(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test.service").write_text(text)
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    words = ["systemd-analyze", "--user", "verify", str(folder / "test.service")]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "HOME": str(folder)}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@needs_systemd
@pytest.mark.parametrize("name", NAMES)
def test_systemd_accepts_the_unit_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"relative:/{name}")
    done = verify(tmp_path, make_boot_command(tmp_path / name).unit_text())
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_a_unit_that_is_wrong_is_found(tmp_path: Path) -> None:
    text = make_boot_command(tmp_path / "50%").unit_text()
    assert verify(tmp_path, text.replace('"holdfast.cli"', '"holdfast.cli')).stderr
    assert verify(tmp_path, text.replace("/usr/bin/env", "/nowhere")).returncode


def words_of(value: str) -> list[str]:
    """Return the words of a setting, by the quoting of systemd.syntax(7)."""
    quoted = [found[1] or found[2] for found in re.finditer(r'"((?:[^"\\]|\\.)*)"|([^ "]+)', value)]
    words = [re.sub(r"\\(.)", r"\1", word) for word in quoted]
    assert not any(re.sub("%%", "", word).count("%") for word in words), "a specifier"
    return [word.replace("%%", "%") for word in words]


@pytest.mark.parametrize("name", NAMES)
def test_any_path_is_in_the_unit_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("sys.executable", f"/opt/{name}/python")
    monkeypatch.setenv("PYTHONPATH", f"/lib/{name}")
    command = make_boot_command(tmp_path / name)
    lines = command.unit_text().splitlines()
    variables = [words_of(line.partition("=")[2]) for line in lines if line.startswith("Environment=")]
    assert variables == [[f"HOLDFAST_STATE={tmp_path / name}"], [f"PYTHONPATH=/lib/{name}"]]
    (start,) = [line.partition("=")[2] for line in lines if line.startswith("ExecStart=")]
    program, *words = words_of(start)
    assert program == "/usr/bin/env"
    assert not any(word.replace("$$", "").count("$") for word in words), "a variable"
    assert tuple(word.replace("$$", "$") for word in words) == command.words
    (description,) = [line for line in lines if line.startswith("Description=")]
    assert not re.sub("%%", "", description).count("%")
    assert not any(line.endswith("\\") for line in lines), "it would continue in the next line"
