"""Gate before an attempt: checks of a node and its disks, in child processes, that may refuse it."""

from __future__ import annotations

import errno
import importlib
import itertools
import mmap
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.jobs.folder import JobFolder, NodeFolder
from holdfast.jobs.journal import encode, read_values
from holdfast.jobs.node.checks.result import (
    MAX_RESULT_BYTES,
    MODE,
    OFF,
    REPORT,
    Check,
    NodeChecks,
    describe_failures,
    read_mode,
)
from holdfast.jobs.node.mounts.mount_records import outside_path, read_links
from holdfast.jobs.node.virtual_environment import activate
from holdfast.jobs.node_spec import NodeSpec, machine_name
from holdfast.system.environment import read_progress
from holdfast.system.host_memory import available_bytes, total_bytes
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.partial_files import partial_file
from holdfast.system.units import format_bytes

LIMIT_S = 10.0
"""Time limit of all checks. What has no result by then is reported, and does not stop the attempt."""
GPU_LIMIT_S = 60.0  # the same for GPUs, whose check has to import torch first
_MAX_HOMES = 4
_MAX_FDS = 1024
COPY_BYTES = 16 << 20
_FEW_COPY_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_NUM_COPIES = 3
SIZE = 192  # rows and columns of the matrices
GREATEST = {"float64": 1 << 20, "float32": 200}  # greatest absolute value of an element, by type
"""All sums stay below 2**53 in float64 and 2**24 in float32, so no order of additions rounds anything."""
_STDOUT = 1
GPU = "gpu"  # name of the check that is a command of the job's Python
_LIMIT_S = 1.0  # time limit for all cores. Those that come later are not tried

Plan = dict[str, Callable[[], Iterator[Check]]]
"""Checks of a node, by name and place."""
Products = Mapping[str, Callable[[], bool]]
"""By type: computes a product, and returns True if it is right."""


class NodeGate:
    """Checks of a node that are running, each in a process of its own, because a disk may hang."""

    def __init__(self, machine: str, plan: Plan) -> None:
        self._machine = machine
        self._unix_s, self._started_s = time.time(), time.monotonic()
        self._limit_s = GPU_LIMIT_S if GPU in plan else LIMIT_S
        self._children = [_Child(name, check) for name, check in plan.items()]

    def wait(self, meanwhile: Callable[[], None]) -> NodeChecks:
        """Return the results."""
        began_s = time.monotonic()
        deadline_s = self._started_s + self._limit_s
        left = {child.pidfd for child in self._children}
        while left and (remaining_s := deadline_s - time.monotonic()) > 0:
            left -= set(select.select(left, [], [], min(1.0, remaining_s))[0])
            meanwhile()
        now_s = time.monotonic()
        results = tuple(check for child in self._children for check in child.end(self._limit_s))
        return NodeChecks(self._machine, self._unix_s, now_s - self._started_s, now_s - began_s, results)


def make_plan(folder: Path, temporary: Path, homes: Sequence[str] = (), num_nodes: int = 1) -> Plan:
    """Return the checks of a node: of its job's folder, its TMPDIR, and homes of its training."""
    plan: Plan = {}
    plan[f"disk {folder}"] = lambda: check_disk(folder)
    num_bytes = _num_bytes(temporary, folder)  # most programs find another folder for temporary files
    plan[f"disk {temporary}"] = lambda: check_disk(temporary, num_bytes=num_bytes, stops=False)
    for home in homes[:_MAX_HOMES]:
        plan[f"disk {home}"] = lambda home=home: check_home(home, _num_bytes(Path(home), folder), num_nodes)
    plan["product memory"] = lambda: itertools.chain(check_products(), check_memory())
    return plan


def check_home(home: str, num_bytes: int, num_nodes: int) -> Iterator[Check]:
    """Yield the results for the folder of a home: its disk, and space and memory for the next save."""
    from holdfast.checkpoint.home.inventory import measure_space

    yield from check_disk(Path(home), num_bytes=num_bytes)
    found = measure_space(home)
    if found is not None:
        values = {"needed_bytes": found.needed_bytes, "free_bytes": found.free_bytes}
        yield Check("space", home, found.trouble, stops=bool(found.trouble), values=values)
        if found.needed_bytes:
            needed = found.needed_bytes // max(1, num_nodes)  # nodes stage equal parts of a save
            memory = check_free_memory(available_bytes(), needed)
            yield from [memory] if memory.trouble else []


def _num_bytes(folder: Path, other: Path) -> int:
    """Return the bytes to write to a folder: few if its disk is checked already."""
    try:
        return FEW_BYTES if folder.stat().st_dev == other.stat().st_dev else NUM_BYTES
    except OSError:
        return FEW_BYTES


class _Child:
    """Process of one check: a copy of this one, which prints results as lines into a file in memory."""

    def __init__(self, name: str, check: Callable[[], Iterator[Check]]) -> None:
        self._name = name
        self._results = os.memfd_create("holdfast-check")
        self._pid = os.fork()
        if self._pid == 0:
            _run(check, self._results)
        self.pidfd = os.pidfd_open(self._pid)

    def end(self, limit_s: float) -> Iterator[Check]:
        """End it, and yield its results. A check without an end has failed."""
        has_ended = bool(select.select([self.pidfd], [], [], 0)[0])
        if not has_ended:
            os.kill(self._pid, signal.SIGKILL)  # one in an uninterruptible wait stays until the disk answers
        status = os.waitpid(self._pid, 0 if has_ended else os.WNOHANG)[1]
        file = Path(f"/proc/self/fd/{self._results}")
        yield from read_values(file, Check, tail_bytes=MAX_RESULT_BYTES)  # results come last
        for fd in (self.pidfd, self._results):
            os.close(fd)
        name, _, where = self._name.partition(" ")
        if not has_ended:
            yield Check(name, where, f"no result within {limit_s:.0f} s")
        elif status:
            yield Check(name, where, f"the check ended with status {os.waitstatus_to_exitcode(status)}")


def _run(check: Callable[[], Iterator[Check]], results: int) -> None:
    """Run a check in this new process, and end it."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)  # else the process counts as a trainer with a handler
        os.dup2(results, _STDOUT)
        os.closerange(3, _MAX_FDS)  # locks and leases of this process must not outlive it
        for result in check():
            _print(result)
        status = 0
    except Exception as error:  # noqa: BLE001 - reported as the result of the check
        _print(Check("check", "", f"{type(error).__name__}: {error}"[:300]))
    finally:
        os._exit(status)


def _print(result: Check) -> None:
    # The line before may be the unfinished one of a library.
    os.write(_STDOUT, f"\n{encode(result)}\n".encode())


def become(command: list[str], environment: Mapping[str, str]) -> Iterator[Check]:
    """Replace this process with a command that prints results."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 2):
        os.dup2(null, fd)
    os.execvpe(command[0], command, environment)


def check_copy(available: int) -> Check:
    """Return the result of copies within the memory of this machine."""
    num_bytes = COPY_BYTES if available > 8 * COPY_BYTES else _FEW_COPY_BYTES
    source = os.urandom(_PIECE_BYTES) * (num_bytes // _PIECE_BYTES)
    copy = bytearray(num_bytes)
    view = memoryview(copy)
    best_s = float("inf")
    for _ in range(_NUM_COPIES):
        started_s = time.perf_counter()
        view[:] = source
        best_s = min(best_s, time.perf_counter() - started_s)
    return compare_copy(source, copy, {"copied_bytes": num_bytes, "copy_s": best_s})


def compare_copy(source: bytes, copy: bytearray, values: dict[str, float]) -> Check:
    """Return the result of a copy."""
    at = first_difference(source, copy)
    trouble = "" if at is None else f"a copy differs from its source, from byte {at} on"
    return Check("copy", "memory", trouble, stops=bool(trouble), is_wrong=bool(trouble), values=values)


def check_free_memory(available: int, needed: int) -> Check:
    """Return the result for free memory. `needed` bytes are staged here for a save; 0 if unknown."""
    values = {"available_bytes": available, "total_bytes": total_bytes(), "needed_bytes": needed}
    sizes = f"{format_bytes(needed)}, and {format_bytes(available)} are free"
    trouble = f"staging the next save takes {sizes}" if available < needed else ""
    return Check("memory", "free", trouble, values=values)


def check_memory() -> Iterator[Check]:
    """Yield the results of all checks of the memory."""
    available = available_bytes()
    yield check_free_memory(available, 0)
    yield check_copy(available)


def check_products(products: Products | None = None) -> Iterator[Check]:
    """Yield the result of products on each core that this process may run on, if numpy is installed."""
    products = products or numpy_products()
    if products is None:
        return
    cores = sorted(os.sched_getaffinity(0))
    started_s = time.perf_counter()
    wrong: list[str] = []
    num_tried = 0
    try:
        for core in cores:
            if num_tried and time.perf_counter() - started_s > _LIMIT_S:
                break
            os.sched_setaffinity(0, {core})
            num_tried += 1
            wrong += [f"core {core} ({dtype})" for dtype, is_right in products.items() if not is_right()]
    finally:
        os.sched_setaffinity(0, cores)
    took_s = time.perf_counter() - started_s
    values = {"cores": num_tried, "all_cores": len(cores), "products_s": took_s, "size": SIZE}
    trouble = f"a product of matrices of integers is wrong: {', '.join(wrong[:8])}" if wrong else ""
    where = "cores" if wrong else f"{num_tried} of {len(cores)} cores"
    yield Check("product", where, trouble, stops=bool(wrong), is_wrong=bool(wrong), values=values)


def numpy_products() -> Products | None:
    """Return the products with numpy, and so with the vector units. None: it is not installed."""
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return None
    return {dtype: _with_numpy(numpy, dtype) for dtype in GREATEST}


def _with_numpy(numpy: Any, dtype: str) -> Callable[[], bool]:
    """Return the comparison of a product with that of 64-bit integers, which other units compute."""
    bound, index = GREATEST[dtype], numpy.arange(2 * SIZE * SIZE, dtype="int64")
    mixed = (index * 2654435761 >> 9) % (2 * bound + 1) - bound
    left, right = mixed.reshape(2, SIZE, SIZE)
    expected, factors = left @ right, (left.astype(dtype), right.astype(dtype))
    return lambda: bool((numpy.matmul(*factors) == expected).all())


GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_GPU_SCRIPT = Path(__file__).with_name("gpu_script.py")
_NUM_GPUS, _NUM_NODES = "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NUM_NODES"
_MAX_REFUSAL = 500


def start_checks(
    plan: NodeSpec, job: JobFolder, node: NodeFolder, write: Callable[[str], None], *, is_contained: bool
) -> Callable[[Callable[[], None]], str]:
    """Start the checks of a node, which run while the attempt is prepared.

    `write` writes a line to the log. Return a function that waits for the checks, and returns why the attempt
    is not started here, or an empty text.
    """

    def wait(meanwhile: Callable[[], None]) -> str:
        found = gate.wait(meanwhile)
        stopping = [check for check in found.failed if check.stops and mode != REPORT]
        for check in found.failed:
            write(f"a check of this node failed: {describe_failures([check])}")
        with suppress(OSError):  # the disk is full or broken, which a check has found
            document = replace(found, was_refused=bool(stopping))
            write_atomic(node.checks, encode(document), is_durable=False)
        return describe_failures(stopping)[:_MAX_REFUSAL]

    text = plan.environment.get(MODE)
    if (mode := read_mode(text)) is None:
        write(f"{MODE} is {text!r:.100}, expected stop, report or off. It is taken for stop.")
    if mode == OFF:
        return lambda _: ""
    try:
        gate = NodeGate(machine_name(), _plan_checks(plan, job, is_contained))
    except OSError as error:  # no process or descriptor is left: the commands will need some too
        write(f"the checks of this node cannot start: {error}")
        return lambda _: ""
    return wait


def _plan_checks(plan: NodeSpec, job: JobFolder, is_contained: bool) -> Plan:
    links = read_links(job)
    outside = [outside_path(home, links) for home in read_progress(job.progress).steps]
    # Mounts are not there yet, and a folder below a mount point would be another one.
    local = [Path(home) for home in outside if "://" not in home]
    homes = [str(one) for one in local if not one.is_relative_to(job.copies) and one.is_dir()]
    temporary = Path("/tmp" if is_contained else plan.environment.get("TMPDIR") or "/tmp")
    num_nodes, num_gpus = (plan.environment.get(name, "") for name in (_NUM_NODES, _NUM_GPUS))
    checks = make_plan(job.path, temporary, homes, int(num_nodes) if num_nodes.isdecimal() else 1)
    has_gpus = num_gpus.isdecimal() and int(num_gpus) > 0 and any(path.exists() for path in GPU_DEVICES)
    if has_gpus and not is_contained:
        environment = activate(plan.environment, plan.venv)
        path = environment.get("PATH")
        python = shutil.which("python", path=path) or shutil.which("python3", path=path)
        if python is not None:
            checks[GPU] = lambda: become([python, str(_GPU_SCRIPT), "cuda"], environment)
    return checks


NUM_BYTES = 4 << 20  # bytes that are written to each disk
FEW_BYTES = 4096  # bytes that are written to a further folder on a disk
MAX_OFFSET_S = 5.0  # longest difference between this machine's clock and that of a file system
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.ENOENT, errno.ELOOP)


def check_disk(folder: Path, *, num_bytes: int = NUM_BYTES, stops: bool = True) -> Iterator[Check]:
    """Yield the results for the disk of a folder, and for its clock. Wrong bytes always stop the attempt."""
    try:
        data = os.urandom(_that_fit(folder, num_bytes))
        fd, is_named = _open_unnamed(folder)
        with os.fdopen(fd, "w+b") as file:
            before_s = time.time()
            started_s = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(fd)
            write_s = time.perf_counter() - started_s
            offset_s = clock_offset_s(os.fstat(fd).st_mtime, before_s, time.time())
            started_s = time.perf_counter()
            found = _read_back(fd, len(data), folder)
            read_s = time.perf_counter() - started_s
    except OSError as error:
        yield Check("disk", str(folder), f"it cannot be written to: {error.strerror}", stops=stops)
        return
    values = {"written_bytes": len(data), "write_s": write_s, "read_s": read_s, "is_named": float(is_named)}
    at = first_difference(data, found)
    what = f"{len(data)} bytes were written, and other bytes were read back, from offset {at} on"
    trouble = "" if at is None else what
    yield Check("disk", str(folder), trouble, stops=bool(trouble), is_wrong=bool(trouble), values=values)
    word = "behind" if offset_s > 0 else "ahead of"
    what = f"this machine's clock is {abs(offset_s):.0f} s {word} that of the file system"
    trouble = what if abs(offset_s) > MAX_OFFSET_S else ""
    yield Check("clock", str(folder), trouble, values={"offset_s": offset_s})


def clock_offset_s(modified_s: float, before_s: float, after_s: float) -> float:
    """Return the lead of a file system's clock, from a write between two times, or 0; pure."""
    if modified_s > after_s:
        return modified_s - after_s
    return min(0.0, modified_s - before_s)


def first_difference(written: bytes, found: bytes | bytearray) -> int | None:
    """Return the first offset of a difference between two byte strings, or None."""
    if written == found:
        return None
    pairs = enumerate(zip(written, found, strict=False))
    return next((offset for offset, (one, other) in pairs if one != other), min(len(written), len(found)))


def _that_fit(folder: Path, num_bytes: int) -> int:
    """Return the bytes to write to a folder. On a small disk, most of its space stays free for others."""
    found = os.statvfs(folder)
    share = found.f_bavail * found.f_frsize // 8 // FEW_BYTES * FEW_BYTES
    return max(FEW_BYTES, min(num_bytes, share))


def _open_unnamed(folder: Path) -> tuple[int, bool]:
    """Open a new file without a name. Return True if it had one at first."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600), False
    except OSError as error:
        if error.errno not in _NO_UNNAMED or not folder.is_dir():
            raise
    with partial_file(folder / "holdfast-check") as path:
        return os.open(path, flags), True


def _read_back(fd: int, num_bytes: int, folder: Path) -> bytes:
    """Return the bytes of a file, without the page cache if possible."""
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _DIRECT_REFUSED:
            raise
        os.posix_fadvise(fd, 0, num_bytes, os.POSIX_FADV_DONTNEED)
        return os.pread(fd, num_bytes, 0)
    try:
        with mmap.mmap(-1, num_bytes) as buffer:  # aligned, as direct reads have to be
            size = os.preadv(direct, [buffer], 0)
            return buffer[:size]
    finally:
        os.close(direct)
