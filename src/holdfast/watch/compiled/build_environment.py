"""Environment that compiled code depends on (torch, compiler, CPU, GPU), and its cache key."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import TypeAlias

from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.sealed import dumps
from holdfast.system.linux.program_runs import run_program

BuildEnvironment: TypeAlias = "dict[str, str]"

_COMPILER_ANSWERS_S = 10.0
_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def environment_key(facts: BuildEnvironment) -> str:
    """Return the cache key of an environment: 32 hex digits."""
    return digest(dumps(dict(sorted(facts.items()))))


def format_difference(here: BuildEnvironment, there: BuildEnvironment) -> str:
    """Return the names of facts that differ between two environments."""
    names = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    return ", ".join(names) or "nothing"


@functools.cache
def current_environment() -> BuildEnvironment:
    """Return the environment of this process and machine.

    Inductor's own keys include torch, its settings and the GPU. On a CPU they lack the processor and its
    libraries, although the compiler builds for this processor only. So the environment includes all of them.

    Blocks: briefly, the first time, to run the C++ compiler for its version.
    """
    import torch

    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": f"{sys.implementation.cache_tag} {platform.python_version()}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": _version("triton"),
        "cuda": str(torch.version.cuda),
        "hip": str(torch.version.hip),
        "gpu": _gpus(),
        "cpu": _cpu(_CPUINFO.read_text(errors="replace") if _CPUINFO.exists() else ""),
        "compiler": _compiler(),
        # The compiler's command contains them, and its hash is part of file names.
        "folders": f"{Path(torch.__file__).parent} {sysconfig.get_path('include')}",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu(cpuinfo: str) -> str:
    """Return vendor and features of the processor, in a fixed order."""
    found: dict[str, set[str]] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("vendor_id", "flags", "Features", "CPU implementer", "isa"):
            found.setdefault(name.strip(), set()).update(value.split())
    return "; ".join(f"{name}: {' '.join(sorted(values))}" for name, values in sorted(found.items()))


def _gpus() -> str:
    """Return the GPU models from the kernel. Asking CUDA would initialise it in this process."""
    kinds = set()
    for path in _NVIDIA.glob("*/information"):
        kinds |= {line.partition(":")[2].strip() for line in _lines(path) if line.startswith("Model:")}
    for path in _AMD.glob("*/properties"):
        kinds |= {line for line in _lines(path) if line.startswith("gfx_target_version")}
    return ", ".join(sorted(kinds - {"gfx_target_version 0"}))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _compiler() -> str:
    """Return the first line of the C++ compiler's version, or an empty string."""
    command = [*shlex.split(os.environ.get("CXX", "g++")), "--version"]
    try:
        done = run_program(command, timeout_s=_COMPILER_ANSWERS_S)
    except (OSError, ValueError):
        return ""
    return done.text.partition("\n")[0]
