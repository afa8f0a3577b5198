"""Virtual environment of a node of a job, on top of the parent Python: made at once, kept between attempts.

The parent Python is the one that the commands of the job would run without it.

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
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import Corrupt, Unsupported
from holdfast.jobs.environment import read_packaged
from holdfast.system.documents import decode_as
from holdfast.system.failpoint import failpoint
from holdfast.system.linux.program_runs import run_program

_MAX_SCRIPT_BYTES = 1 << 20
_NOT_COPIED = ("python", "pip", "activate", "conda", "mamba")
"""Beginnings of the names of scripts that belong to one environment."""
_PIP = b"""import runpy

runpy.run_module("pip", run_name="__main__", alter_sys=True)
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
_LIMIT_S = 60.0
_MAX_CONFIG_BYTES = 1 << 16
_QUESTION = """
import importlib.util, json, os, site, sys, sysconfig
base = getattr(sys, "_base_executable", None) or sys.executable
print(json.dumps({
    "executable": sys.executable,
    "binary": os.path.realpath(sys.executable),
    "home": os.path.dirname(os.path.realpath(base)),
    "version": "%d.%d" % sys.version_info[:2],
    "implementation": sys.implementation.name,
    "site": sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else None,
    "sees_system": sys.base_prefix in site.PREFIXES,
    "scripts": [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", "posix_user")],
    "has_pip": importlib.util.find_spec("pip") is not None,
}))
"""


class ParentPython(Struct, frozen=True):
    """Properties of the parent Python that a virtual environment on top of it needs."""

    executable: str  # path by which it is called
    binary: str  # the same without links
    home: str  # folder of the binary from which its standard library is found
    version: str  # such as 3.11
    site: str | None  # site-packages of a virtual environment; None: not a virtual environment
    sees_system: bool  # it imports packages of a Python that is not a virtual environment
    scripts: tuple[str, ...]  # folders of its console scripts
    has_pip: bool
    implementation: str = "cpython"


PARENT = "holdfast-parent"
"""Key of pyvenv.cfg with the path of the parent Python, in the virtual environment of a job."""


def own_python() -> str:
    """Return the Python for processes of Holdfast that outlive this one.

    For a command that runs in a job, such as one that launches another job, this is the parent Python, since
    the environment of the job is removed with the job. If the job has installed Holdfast, it is its own.
    """
    python = sys.executable
    is_of_job = Path(__file__).is_relative_to(sys.prefix)
    while not is_of_job and (parent := read_config(Path(python)).get(PARENT)):
        python = parent
    return python


def find_parent(
    environment: Mapping[str, str], workdir: Path, on_look: Callable[[], object]
) -> ParentPython | None:
    """Return the first Python on the PATH, or None if it does not have any.

    It is called once: it may be a shim, which chooses a version by the current directory. `on_look` is called
    while it runs.
    """
    path = environment.get("PATH", os.defpath)
    found = shutil.which("python3", path=path) or shutil.which("python", path=path)
    if found is None:
        return None
    command = [found, "-I", "-c", _QUESTION]
    try:
        done = run_program(command, timeout_s=_LIMIT_S, env=environment, cwd=workdir, on_look=on_look)
    except OSError as error:
        raise Unsupported(f"{found} does not run: {error}") from error
    if done.status:
        words = done.error.split("\n")
        last = next((line for line in reversed(words) if line.strip()), "no message")
        raise Unsupported(f"{found} does not run: it exits with {done.status}: {last[:200]}")
    answer = done.out.strip().rpartition(b"\n")[2]
    try:
        parent = decode_as(ParentPython, answer, f"the answer of {found}", any_text=True)
    except Corrupt as error:
        raise Unsupported(f"{found} is not a Python that Holdfast knows: {error}") from error
    if parent.implementation != "cpython":
        raise Unsupported(f"{found} is {parent.implementation}, expected CPython")
    on_path = [os.path.realpath(one) for one in environment.get("PATH", os.defpath).split(os.pathsep)]
    first, *others = parent.scripts  # shims stand for the first folder, which need not be on the PATH
    seen = tuple(one for one in others if os.path.realpath(one) in on_path)
    return replace(parent, scripts=(first, *seen))


def read_config(executable: Path) -> dict[str, str]:
    """Return the settings in the pyvenv.cfg of a Python. It may not exist."""
    try:
        with (executable.parent.parent / "pyvenv.cfg").open(encoding="utf-8", errors="replace") as file:
            lines = file.read(_MAX_CONFIG_BYTES).splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def make_virtual_environment(folder: Path, parent: ParentPython) -> None:
    """Make an environment, in the place of an existing one. It appears whole or not at all."""
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
    for created in (programs, packages):
        created.mkdir(mode=0o700, parents=True)
    (making / "lib64").symlink_to("lib")
    config = (
        f"home = {parent.home}\n"
        f"include-system-site-packages = {str(parent.sees_system).lower()}\n"
        f"version = {parent.version}\n"
        f"{PARENT} = {parent.executable}\n"
    )
    (making / "pyvenv.cfg").write_bytes(os.fsencode(config))
    _write_packages(packages, parent)
    for name in ("python", "python3", f"python{parent.version}"):
        (programs / name).symlink_to(parent.binary)
    activate = read_packaged("node/activate.sh").replace("{folder}", shlex.quote(str(folder)))
    (programs / "activate").write_bytes(os.fsencode(activate))
    python = str(folder / "bin" / "python")
    pip = shebang(python) + _PIP
    scripts = {"pip": pip, "pip3": pip, f"pip{parent.version}": pip, **dict(_parent_scripts(parent, python))}
    for name, text in scripts.items():
        (programs / name).write_bytes(text)
        (programs / name).chmod(0o755)


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
    """Return a script of the parent for another Python, or None for a different file."""
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
    """Return the variables of the launching shell without those that choose another environment."""
    return {**{name: value for name, value in base.items() if name not in _ELSEWHERE}, **_NOT_IN_USER_SITE}


def activate(environment: Mapping[str, str], folder: str | None) -> Mapping[str, str]:
    """Return the variables of commands in a virtual environment, if there is one."""
    if folder is None or not Path(folder).is_dir():
        return environment
    kept = {name: value for name, value in environment.items() if name != "PYTHONHOME"}
    path = environment.get("PATH", os.defpath)
    return {**kept, "VIRTUAL_ENV": folder, "PATH": f"{folder}/bin:{path}"}
