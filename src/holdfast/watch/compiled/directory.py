"""Local directory of the compile cache, and the environment that compiled code depends on, with its key."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import platform
import shlex
import stat
import struct
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.store.contract import check_name
from holdfast.errors import InvalidInput
from holdfast.system import privacy
from holdfast.system.documents import is_text, shown
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.processes import start_time
from holdfast.system.linux.program_runs import run_program
from holdfast.system.privacy import private_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with torch.compile's cache directory. torch sets it on first use."""
FOLDER = "compiled/"  # prefix of all objects of compile caches in a home
MAX_FILE_BYTES = 256 << 20  # largest file to upload
MAX_PATH_CHARS = 1024
MAX_FILES = 50_000  # most files of a directory that are considered

_TORCH_CHOOSES = "torch._inductor.runtime.cache_dir_utils"
_LEFT_OUT_FOLDERS = ("locks", "precompiled_headers")
_LEFT_OUT_ENDS = (".lock", ".tmp")
_IS_BEING_BUILT = "_CxxBuild"  # inductor's folder next to a file that the compiler is writing


class Directory(Struct, frozen=True):
    """A cache directory of torch.compile."""

    path: Path  # the directory
    since_unix_s: float = 0.0
    """Older files belong to other programs, which share the directory. 0 for a directory of this run or of
    the user's choice."""


def is_chosen() -> bool:
    """Return True if the user has chosen torch.compile's cache directory."""
    named = os.environ.get(VARIABLE)
    torch_chooses = sys.modules.get(_TORCH_CHOOSES)
    return bool(named) and not (torch_chooses and named == torch_chooses.default_cache_dir())


def current() -> Directory | None:
    """Return the directory in use, or None before anything was compiled."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named).absolute()
    usual = Path(importlib.import_module(_TORCH_CHOOSES).default_cache_dir())
    if not is_chosen() and path == usual.absolute() and os.path.lexists(usual) and not privacy.is_own(usual):
        return None  # created by another user: its files are not trusted
    since_unix_s = 0.0
    if not (is_chosen() or is_own(path)):  # since the start of this process, by the clock of file times
        started_s = (start_time(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
        since_unix_s = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    return Directory(path, since_unix_s)


def point_to_own(home: str) -> None:
    """Point torch.compile to a directory of this run, unless the user has chosen one."""
    found = current() if is_chosen() else None
    if found is None or is_own(found.path):
        os.environ[VARIABLE] = str(own(home, environment_key(current_environment())))


def own(home: str, key: str) -> Path:
    """Return this run's own directory on this host. Creates it if needed.

    Its path is the same on every machine with the same folder for temporary files.
    """
    # Files in it are run as code.
    folder = private_folder(Path(tempfile.gettempdir()) / f"holdfast-compiled-{os.getuid()}")
    path = folder / digest(f"{home}\n{key}".encode())
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def is_own(path: Path) -> bool:
    """Return True for a directory from `own`."""
    return path.parent.name.startswith(f"holdfast-compiled-{os.getuid()}")


def whole_files(directory: Directory) -> dict[str, int]:
    """Return the size of each complete file by path, without files that are being written."""
    found: dict[str, int] = {}
    for path, size, changed_unix_s in _walk(directory.path, ""):
        if len(found) >= MAX_FILES:
            break
        if changed_unix_s >= directory.since_unix_s and size <= MAX_FILE_BYTES and _can_be_named(path):
            found[path] = size
    return found


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, int, float]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return  # deleted meanwhile
    built = [entry.name for entry in entries if entry.name.endswith(_IS_BEING_BUILT)]
    in_work = {f"{name.removesuffix(_IS_BEING_BUILT)}." for name in built}
    for entry in entries:
        name = entry.name
        if entry.is_dir(follow_symlinks=False):
            if not name.endswith(_IS_BEING_BUILT) and not (prefix == "" and name in _LEFT_OUT_FOLDERS):
                yield from _walk(folder / name, f"{prefix}{name}/")
        elif entry.is_file(follow_symlinks=False):
            if name.startswith((".", *in_work)) or name.endswith(_LEFT_OUT_ENDS):
                continue
            with contextlib.suppress(FileNotFoundError):
                facts = entry.stat(follow_symlinks=False)
                yield f"{prefix}{name}", facts.st_size, facts.st_mtime


def _can_be_named(path: str) -> bool:
    with contextlib.suppress(InvalidInput):
        return bool(check_path(path))
    return False


def check_path(path: str) -> str:
    """Return a path, if it stays inside its directory."""
    if not isinstance(path, str) or len(path) > MAX_PATH_CHARS or "\\" in path or not is_text(path):
        raise InvalidInput(f"{shown(path)} is not a valid path in a compile cache.")
    return check_name(path)


def read_whole(directory: Directory, path: str) -> bytes | None:
    """Return the bytes of a file, or None if it is missing or incomplete."""
    try:
        fd = os.open(directory.path / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        before = os.fstat(fd)
        data = file.read()
        after = os.fstat(fd)
    changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    return None if changed or len(data) != after.st_size or _is_torn(data) else data


def _is_torn(data: bytes) -> bool:
    """Return True for an incomplete ELF binary: a linker writes the section table last.

    Source: System V ABI, chapter 4: e_shoff, e_shentsize and e_shnum of 64-bit ELF headers.
    """
    if not data.startswith(b"\x7fELF\x02\x01"):
        return False
    if len(data) < 64:
        return True
    (at,) = struct.unpack_from("<Q", data, 40)
    entry_bytes, num_entries = struct.unpack_from("<HH", data, 58)
    return at == 0 or at + entry_bytes * num_entries > len(data)


def has(directory: Directory, path: str, num_bytes: int) -> bool:
    """Return True if a file of this size exists."""
    try:
        found = (directory.path / path).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == num_bytes


def place(directory: Directory, path: str, data: bytes) -> None:
    """Write a file atomically."""
    target = directory.path / check_path(path)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.parent.resolve() != directory.path.resolve() / Path(path).parent:
        raise InvalidInput(f"{path} leads out of {directory.path} through a link. It was not written.")
    write_atomic(target, data, is_durable=False)


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
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
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
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return []


def _compiler() -> str:
    """Return the first line of the C++ compiler's version, or an empty string."""
    command = [*shlex.split(os.environ.get("CXX", "g++")), "--version"]
    try:
        done = run_program(command, timeout_s=_COMPILER_ANSWERS_S)
    except (OSError, ValueError):
        return ""
    return done.text.partition("\n")[0]
