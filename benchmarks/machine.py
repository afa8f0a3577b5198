"""Facts of the machine, without which a result is worth nothing, and the files of results."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).resolve().parent / "results"
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


def results_path(kind: str, machine: dict[str, Any]) -> Path:
    """Return the path for results of a kind: only those of the same machine and day are overwritten."""
    stem = f"{kind}_{slug(machine)}_{machine['date'][:10]}"
    paths = (RESULTS / f"{stem}{'' if number == 1 else f'_{number}'}.json" for number in itertools.count(1))
    return next(path for path in paths if not path.exists() or _is_of(path, machine))


def _is_of(path: Path, machine: dict[str, Any]) -> bool:
    found = json.loads(path.read_text())["machine"]
    return all(found[key] == machine[key] for key in ("cpu", "cores", "memory_bytes", "disk", "kernel"))


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
    """Return the commit, marked as dirty if code was changed after it."""
    try:
        commit = _git("describe", "--always")
        changed = _git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(*words: str) -> str:
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(
        ["git", *words], capture_output=True, text=True, check=True, cwd=root
    ).stdout.strip()


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
