"""Parent Python of a job: the one that its commands would run without a virtual environment of its own."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import Corrupt, Unsupported
from holdfast.system.documents import decode_dataclass
from holdfast.system.linux.program_runs import run_program

_LIMIT_S = 60.0
_MAX_CONFIG_BYTES = 1 << 16
_SYSTEM_SITE = "include-system-site-packages"
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


@dataclass(frozen=True, slots=True)
class ParentPython:
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


def find_parent(environment: Mapping[str, str], workdir: Path) -> ParentPython | None:
    """Return the first Python on the PATH, or None if it does not have any.

    A virtual environment is read from its files. Any other Python is called once: it may be a shim, which
    chooses a version by the current directory.

    Args:
        environment: all variables of the job's commands.
        workdir: their working directory.
    """
    path = environment.get("PATH", os.defpath)
    found = shutil.which("python3", path=path) or shutil.which("python", path=path)
    if found is None:
        return None
    return _read_virtual_environment(Path(found)) or _ask(found, environment, workdir)


def _read_virtual_environment(executable: Path) -> ParentPython | None:
    """Return a virtual environment with pip, or None if its Python must be called."""
    config = read_config(executable)
    home, version = config.get("home"), config.get("version") or config.get("version_info")
    is_plain = config.get(_SYSTEM_SITE) == "false"
    if home is None or version is None or not is_plain or not (Path(home) / "python3").exists():
        return None
    short = ".".join(version.split(".")[:2])
    site = executable.parent.parent / "lib" / f"python{short}" / "site-packages"
    if not (site / "pip" / "__init__.py").is_file():
        return None
    return ParentPython(
        executable=str(executable),
        binary=os.path.realpath(executable),
        home=home,
        version=short,
        site=str(site),
        sees_system=False,
        scripts=(str(executable.parent),),
        has_pip=True,
    )


def read_config(executable: Path) -> dict[str, str]:
    """Return the settings in the pyvenv.cfg of a Python. It may not exist."""
    try:
        with (executable.parent.parent / "pyvenv.cfg").open(encoding="utf-8", errors="replace") as file:
            lines = file.read(_MAX_CONFIG_BYTES).splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _ask(found: str, environment: Mapping[str, str], workdir: Path) -> ParentPython:
    command = [found, "-I", "-c", _QUESTION]
    try:
        done = run_program(command, timeout_s=_LIMIT_S, env=environment, cwd=workdir)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"{found} does not run: {error}") from error
    if done.status:
        words = done.error.split("\n")
        last = next((line for line in reversed(words) if line.strip()), "no message")
        raise Unsupported(f"{found} does not run: it exits with {done.status}: {last[:200]}")
    answer = done.out.strip().rpartition(b"\n")[2]
    try:
        parent = decode_dataclass(ParentPython, answer, f"the answer of {found}", any_text=True)
    except Corrupt as error:
        raise Unsupported(f"{found} is not a Python that Holdfast knows: {error}") from error
    if parent.implementation != "cpython":
        raise Unsupported(f"{found} is {parent.implementation}, expected CPython")
    on_path = [os.path.realpath(one) for one in environment.get("PATH", os.defpath).split(os.pathsep)]
    first, *others = parent.scripts  # shims stand for the first folder, which need not be on the PATH
    seen = tuple(one for one in others if os.path.realpath(one) in on_path)
    return dataclasses.replace(parent, scripts=(first, *seen))
