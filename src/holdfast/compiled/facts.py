"""What compiled code depends on besides its source: torch, compiler, processor, GPU; and the key of that."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TypeAlias

from holdfast.format.hashes import digest
from holdfast.format.sealed import dumps

Facts: TypeAlias = "dict[str, str]"

_COMPILER_ANSWERS_S = 10.0
_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def key_of(facts: Facts) -> str:
    """The key under which compiled code for such a machine is kept: 32 hex digits."""
    return digest(dumps(dict(sorted(facts.items()))))


def say_difference(here: Facts, there: Facts) -> str:
    """In which facts two machines differ, in words."""
    names = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    return ", ".join(names) or "nothing"


@functools.cache
def facts_of_machine() -> Facts:
    """The facts of this process and machine.

    Inductor's own keys know torch, its settings and the GPU. On a CPU they do not know the processor, though
    the compiler is told to build for just this one, nor its libraries; so all of it is here.

    Blocks: shortly, the first time: the C++ compiler is asked for its version.
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
        # They stand in the compiler's command, which is part of the name of what it has made.
        "folders": f"{Path(torch.__file__).parent} {sysconfig.get_path('include')}",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu(cpuinfo: str) -> str:
    """Vendor and features of the processor, whatever order the kernel tells them in."""
    told: dict[str, set[str]] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("vendor_id", "flags", "Features", "CPU implementer", "isa"):
            told.setdefault(name.strip(), set()).update(value.split())
    return "; ".join(f"{name}: {' '.join(sorted(values))}" for name, values in sorted(told.items()))


def _gpus() -> str:
    """The kinds of GPUs of this machine, from the kernel: asking CUDA would start it in this process."""
    kinds = set()
    for told in _NVIDIA.glob("*/information"):
        kinds |= {line.partition(":")[2].strip() for line in _lines(told) if line.startswith("Model:")}
    for told in _AMD.glob("*/properties"):
        kinds |= {line for line in _lines(told) if line.startswith("gfx_target_version")}
    return ", ".join(sorted(kinds - {"gfx_target_version 0"}))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _compiler() -> str:
    """The first line of what the C++ compiler says of its version; empty where there is none."""
    command = [*shlex.split(os.environ.get("CXX", "g++")), "--version"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILER_ANSWERS_S
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0]
