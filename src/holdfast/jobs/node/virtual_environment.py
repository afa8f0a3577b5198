"""Virtual environment of a node of a job, on top of the parent Python: made at once, kept between attempts.

Source: PEP 405. A virtual environment is a link to a Python, a folder for packages, and a file that names the
folder of the standard library. `python -m venv` writes the same, and takes 10 to 500 times as long.

pip and uv write console scripts with the path of their Python in the first line. If that line would be too
long for Linux, or the path contains spaces, they write three lines that are valid for a shell and for Python.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

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
_MAX_SHEBANG_BYTES = 127  # Linux cuts a longer line
_FIRST = re.compile(rb"#!\s*(/\S+)[ \t]*(.*)")
_SECOND = re.compile(rb"""'''exec' (?P<python>.+?)(?P<options>(?: -\w+)*) "\$0" "\$@"[ \t]*""")
_RELATIVE = b"$(dirname "
VENV = "HOLDFAST_VENV"
"""Variable that is `none` for a job without a virtual environment of its own. Default: `job`."""
DEFAULT = "job"
NONE = "none"

_ELSEWHERE = (
    *("PIP_PREFIX", "PIP_PYTHON", "PIP_ROOT", "PIP_TARGET", "PIP_USER"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON"),
)
"""Variables with which pip and uv install elsewhere than into the active environment."""
_NOT_IN_USER_SITE = {"PIP_USER": "0"}  # settings files of pip may have the opposite


def make_virtual_environment(folder: Path, parent: ParentPython) -> None:
    """Make an environment, in the place of an existing one. It appears whole or not at all.

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


def rewrite(script: bytes, python: str, is_parent: Callable[[str], bool]) -> bytes | None:
    """Return a script of the parent for another Python, or None for a different file.

    Args:
        script: contents of the file.
        python: path of the other Python.
        is_parent: returns True for a path of the parent's Python.
    """
    first, _, rest = script.partition(b"\n")
    match = _FIRST.fullmatch(first.rstrip())
    if match is None:
        return None
    found, options = match.groups()
    if found == b"/bin/sh" and not options:
        second, _, rest = rest.partition(b"\n")
        match = _SECOND.fullmatch(second)
        end, _, rest = rest.partition(b"\n")
        if match is None or end.strip() != b"' '''" or not _is_quoted_parent(match["python"], is_parent):
            return None
        options = match["options"].strip()
    elif not is_parent(found.decode("utf-8", "surrogateescape")):
        return None
    return shebang(python, options) + rest


def shebang(python: str, options: bytes = b"") -> bytes:
    """Return the beginning of a script that a Python runs."""
    path = python.encode("utf-8", "surrogateescape")
    line = b" ".join(filter(None, (b"#!" + path, options)))
    if len(line) < _MAX_SHEBANG_BYTES and not re.search(rb"\s", path):
        return line + b"\n"
    quoted = shlex.quote(python).encode("utf-8", "surrogateescape")
    command = b" ".join(filter(None, (b"'''exec'", quoted, options)))
    return b"#!/bin/sh\n" + command + b' "$0" "$@"\n' + b"' '''\n"


def _is_quoted_parent(word: bytes, is_parent: Callable[[str], bool]) -> bool:
    if _RELATIVE in word:  # uv's relocatable environments: the Python beside the script
        return True
    try:
        words = shlex.split(word.decode("utf-8", "surrogateescape"))
    except ValueError:
        return False
    return len(words) == 1 and is_parent(words[0])


def is_wanted(variables: Mapping[str, str]) -> bool:
    """Return True if a job has a virtual environment of its own."""
    return variables.get(VENV, DEFAULT).strip().lower() != NONE


def install_here(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a shell without those that choose another environment.

    Args:
        base: variables of the shell that launched the job. Those of its task are not changed.
    """
    return {**{name: value for name, value in base.items() if name not in _ELSEWHERE}, **_NOT_IN_USER_SITE}


def activate(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables of commands in a virtual environment.

    Args:
        folder: folder of the environment.
    """
    kept = {name: value for name, value in environment.items() if name != "PYTHONHOME"}
    path = environment.get("PATH", os.defpath)
    return {**kept, "VIRTUAL_ENV": folder, "PATH": f"{folder}/bin:{path}"}
