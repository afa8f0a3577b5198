"""Virtual environment of a node of a job, on top of the parent Python: made at once, kept between attempts.

Source: PEP 405. A virtual environment is a link to a Python, a folder for packages, and a file that names the
folder of the standard library. `python -m venv` writes the same, and takes 10 to 500 times as long.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from holdfast.jobs.node.console_scripts import rewrite, shebang
from holdfast.jobs.node.parent_python import PARENT, ParentPython
from holdfast.system.failpoint import failpoint

_MAX_SCRIPT_BYTES = 1 << 20
_NOT_COPIED = ("python", "pip", "activate", "conda", "mamba")
"""Beginnings of the names of scripts that belong to one environment."""
_PIP = b"""import runpy

runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_ACTIVATE = """# Activates this environment in a shell that has left it.
deactivate() {{ PATH=$_HOLDFAST_PATH; unset VIRTUAL_ENV _HOLDFAST_PATH; unset -f deactivate; hash -r; }}
_HOLDFAST_PATH=$PATH
export VIRTUAL_ENV={folder}
export PATH="$VIRTUAL_ENV/bin:$PATH"
hash -r
"""


def make_virtual_environment(folder: Path, parent: ParentPython) -> None:
    """Make an environment, in the place of an existing one. It appears whole or not at all.

    Raises:
        OSError: a file cannot be written or removed.

    Blocks: while an existing one is removed.
    """
    for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed
        shutil.rmtree(left)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        folder.rename(old)
        shutil.rmtree(old)
    making = folder.with_name(f".{folder.name}.new")
    try:
        _write(making, folder, parent)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)  # the disk may be full
        raise
    failpoint("jobs.venv")
    making.rename(folder)


def _write(making: Path, folder: Path, parent: ParentPython) -> None:
    """Write the environment `folder` under another name."""
    programs = making / "bin"
    packages = making / "lib" / f"python{parent.version}" / "site-packages"
    for one in (programs, packages):
        one.mkdir(mode=0o700, parents=True)
    (making / "lib64").symlink_to("lib")
    (making / "pyvenv.cfg").write_bytes(os.fsencode(_config(parent)))
    _write_packages(packages, parent)
    for name in ("python", "python3", f"python{parent.version}"):
        (programs / name).symlink_to(parent.binary)
    (programs / "activate").write_bytes(os.fsencode(_ACTIVATE.format(folder=shlex.quote(str(folder)))))
    python = str(folder / "bin" / "python")
    pip = shebang(python) + _PIP
    scripts = {"pip": pip, "pip3": pip, f"pip{parent.version}": pip, **dict(_parent_scripts(parent, python))}
    for name, text in scripts.items():
        (programs / name).write_bytes(text)
        (programs / name).chmod(0o755)


def _config(parent: ParentPython) -> str:
    return (
        f"home = {parent.home}\n"
        f"include-system-site-packages = {str(parent.sees_system).lower()}\n"
        f"version = {parent.version}\n"
        f"{PARENT} = {parent.executable}\n"
    )


def _write_packages(packages: Path, parent: ParentPython) -> None:
    here = Path(__file__).parent
    shutil.copyfile(here / "parent_packages.py", packages / "_holdfast_parent_packages.py")
    call = f"import _holdfast_parent_packages; _holdfast_parent_packages.add_parent({parent.site!a})"
    # Its name is the last one, so that editable packages of the job come before the parent's.
    (packages / "zzz_holdfast_parent_packages.pth").write_text(f"{call}\n")
    if not parent.has_pip:
        (packages / "pip").mkdir()
        (packages / "pip" / "__init__.py").touch()
        shutil.copyfile(here / "missing_pip.py", packages / "pip" / "__main__.py")


def _parent_scripts(parent: ParentPython, python: str) -> Iterator[tuple[str, bytes]]:
    """Yield the console scripts of the parent, for another Python."""
    is_parent = _recognizer(parent)
    for folder in reversed(parent.scripts):  # the first folder has the last word
        try:
            entries = list(os.scandir(folder))
        except OSError:  # it does not exist, or belongs to another user
            continue
        for entry in entries:
            if not entry.name.startswith(_NOT_COPIED) and (text := _read_script(entry)) is not None:
                own = rewrite(text, python, is_parent)
                if own is not None:
                    yield entry.name, own


def _recognizer(parent: ParentPython) -> Callable[[str], bool]:
    """Return a function that returns True for a path of the parent Python."""
    programs = os.path.realpath(os.path.dirname(parent.executable))  # noqa: PTH120

    @lru_cache
    def is_parent(path: str) -> bool:
        folder, name = os.path.split(path)
        if not name.startswith("python"):
            return False
        if parent.site is None:
            return os.path.realpath(path) == parent.binary
        return os.path.realpath(folder) == programs

    return is_parent


def _read_script(entry: os.DirEntry[str]) -> bytes | None:
    """Return the contents of a script, or None if a file is something else."""
    try:
        if not entry.is_file() or entry.stat().st_size > _MAX_SCRIPT_BYTES:
            return None
        if not os.access(entry.path, os.R_OK | os.X_OK):
            return None
        with open(entry.path, "rb") as file:  # noqa: PTH123
            start = file.read(2)
            return start + file.read() if start == b"#!" else None
    except OSError:
        return None
