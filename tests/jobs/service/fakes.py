"""Programs in place of systemctl and loginctl: they record their arguments, and keep files."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

_SYSTEMCTL = """
units="$XDG_CONFIG_HOME/systemd/user"
[ -e "$0.manager" ] || { echo "Failed to connect to bus" >&2; exit 1; }
[ "$1" = --user ] || exit 9
if [ "$2" = enable ]; then
    if [ -e "$0.refuses" ]; then echo "Unit file does not exist." >&2; exit 1; fi
    mkdir -p "$units/default.target.wants"; ln -sf "$units/$3" "$units/default.target.wants/$3"
fi
"""
_LOGINCTL = """
case "$*" in
show-user*) if [ -e "$0.lingers" ]; then echo yes; else echo no; fi ;;
*enable-linger*) if [ -e "$0.allows" ]; then touch "$0.lingers"; else echo "Access denied" >&2; exit 1; fi ;;
esac
"""


class FakePrograms:
    """Folder of programs, which is the PATH of the test."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("cat", "ln", "mkdir", "rm", "sh", "touch", "env", "bash"):
            (folder / name).symlink_to(shutil.which(name) or name)
        (folder / "python3").symlink_to(sys.executable)
        patch.setenv("PATH", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder.parent / "config"))
        patch.delenv("XDG_RUNTIME_DIR", raising=False)

    def add_systemd(self, *, allows_linger: bool = True) -> None:
        """Install systemctl and loginctl, with a running manager."""
        self._write("systemctl", _SYSTEMCTL)
        self._write("loginctl", _LOGINCTL)
        self.set("systemctl.manager")
        if allows_linger:
            self.set("loginctl.allows")

    def set(self, name: str) -> None:
        """Change how a program behaves."""
        (self.folder / name).touch()

    def calls(self, name: str) -> list[str]:
        """Return the argument lists of a program so far."""
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def units(self) -> list[str]:
        """Return all files and folders of units."""
        config = self.folder.parent / "config"
        return sorted(os.path.relpath(path, config) for path in config.rglob("*"))

    def _write(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "$*" >> "$0.calls"\n{script}')
        path.chmod(0o755)
