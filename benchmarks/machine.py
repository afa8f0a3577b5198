"""The facts of the machine that a result is worth nothing without."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "safetensors", "torch_checkpointing", "xxhash", "holdfast")


def describe(directory: Path) -> dict[str, Any]:
    """Processor, memory, kernel, file system of `directory`, versions, date and load."""
    mount = _mount_of(directory)
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "filesystem": mount.fstype if mount else "unknown",
        "disk": mount.device if mount else "unknown",
        "mount_options": mount.opts if mount else "",
        "thp": _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0],
    }


def slug(machine: dict[str, Any]) -> str:
    """The hardware in a file name: processor, cores, memory."""
    cpu = re.sub(r"\(.*?\)|\b(cpu|processor)\b", "", machine["cpu"], flags=re.IGNORECASE)
    cpu = re.sub(r"[^a-z0-9.]+", "-", cpu.lower()).strip("-")
    return f"{cpu}-{machine['cores']}c-{round(machine['memory_bytes'] / 2**30)}g"


def _cpu() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), flags=re.MULTILINE)
    return match[1] if match else platform.machine()


def _mount_of(directory: Path) -> Any:
    where = directory.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if where.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint), default=None)


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
