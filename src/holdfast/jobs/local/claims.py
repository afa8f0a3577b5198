"""Claims of jobs to parts of this machine, found in the records of all jobs; their allocation, and ports."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import Conflict, Corrupt, NotFound, RetryLater
from holdfast.jobs import journal
from holdfast.jobs.folder import JobFolder, job_folder, jobs_folder
from holdfast.jobs.node.roles import rouse_controller
from holdfast.jobs.node_spec import NodeSpec
from holdfast.jobs.records import JobRecord, JobSpec, Records
from holdfast.jobs.status import JobStatus
from holdfast.system.host_memory import total_bytes
from holdfast.system.linux import locks
from holdfast.system.units import plural

Devices = tuple[tuple[str, ...], ...]  # GPUs of each node of a job, by rank

_GIB_MIB = 1024
_ROUNDING = 1e-6  # tolerance of sums of parts of CPUs


class Capacity(Struct, frozen=True):
    """CPUs and memory of a machine."""

    cpus: float
    memory_mib: int


class ResourceClaim(Struct, frozen=True):
    """Resources of a job that has started and not ended."""

    job: int
    gpus: tuple[str, ...] = ()
    cpus: float = 0.0
    memory_mib: int = 0
    ports: tuple[int, ...] = ()


class Claims(Struct, frozen=True):
    """Claims of all jobs on this machine: those that may start now, and why the others wait."""

    given: Mapping[int, Devices] = {}  # GPUs of the jobs that may start, by job
    shortages: Mapping[int, str] = {}  # why a job waits, by job, first come first
    holders: tuple[int, ...] = ()  # jobs that have started and not ended, whatever they need
    ports: frozenset[int] = frozenset()  # of the jobs that have started, and those that waiting ones name

    @property
    def leading(self) -> tuple[int, ...]:
        """Jobs that may start now, and the first of those that wait. Only these need a controller."""
        return (*self.given, *list(self.shortages)[:1])

    def is_behind(self, number: int) -> bool:
        """Return True if a job waits behind another one, and needs no controller for now."""
        return number in self.shortages and number not in self.leading


def allocate(
    capacity: Capacity, claims: Iterable[ResourceClaim], waiting: Iterable[tuple[int, JobSpec]]
) -> Claims:
    """Return which of the jobs that wait may start beside those that have started.

    Jobs are served by priority, then by number. One that does not fit keeps what is free of its needs, so
    that later ones start only with what it does not need. Needs beyond the machine count as all of it, except
    for GPUs.
    """
    taken = list(claims)
    given: dict[int, Devices] = {}
    shortages: dict[int, str] = {}
    for job, spec in sorted(waiting, key=lambda one: (-one[1].priority, one[0])):
        claim, needs, users = _take(capacity, taken, job, spec)
        if needs:
            shortages[job] = f"waits for {' and '.join(needs)}{_who(users, shortages.keys())}"
        else:
            each, ranks = len(claim.gpus) // spec.num_nodes, range(spec.num_nodes)
            given[job] = tuple(claim.gpus[rank * each : (rank + 1) * each] for rank in ranks)
        taken.append(claim)
    return Claims(given, shortages)


def _take(
    capacity: Capacity, taken: Sequence[ResourceClaim], job: int, spec: JobSpec
) -> tuple[ResourceClaim, list[str], set[int]]:
    """Return what is free of a job's needs, the needs that are not free, and the jobs that have these."""
    used = {gpu for one in taken for gpu in one.gpus}
    gpus = [gpu for gpu in dict.fromkeys(spec.devices) if gpu not in used]
    num_gpus = spec.num_claimed_gpus
    cpus = min(spec.cpus * spec.num_nodes, capacity.cpus)
    memory_mib = min(spec.memory_mib * spec.num_nodes, capacity.memory_mib)
    free_cpus = max(0.0, capacity.cpus - sum(one.cpus for one in taken))
    free_mib = max(0, capacity.memory_mib - sum(one.memory_mib for one in taken))
    needs: list[str] = []
    users: set[int] = set()
    if len(gpus) < num_gpus:
        needs.append(f"{plural(num_gpus, 'GPU')} ({len(gpus)} free)")
        users |= {one.job for one in taken if set(one.gpus) & set(spec.devices)}
    if cpus > free_cpus + _ROUNDING:
        needs.append(f"{cpus:g} CPU{'' if cpus == 1 else 's'} ({free_cpus:g} free)")
        users |= {one.job for one in taken if one.cpus}
    if memory_mib > free_mib:
        needs.append(f"{_amount(memory_mib)} of memory ({_amount(free_mib)} free)")
        users |= {one.job for one in taken if one.memory_mib}
    for port in spec.ports:
        needs += [f"port {port} of job {one.job}" for one in taken if port in one.ports]
    free = (tuple(gpus[:num_gpus]), min(cpus, free_cpus), min(memory_mib, free_mib))
    return ResourceClaim(job, *free, spec.ports), needs, users


def _who(users: set[int], waiting: Collection[int]) -> str:
    """Return which jobs have, or get first, what another one needs."""
    running, first = sorted(users - set(waiting)), sorted(users & set(waiting))
    parts = [f"{_jobs(running)} {'has' if len(running) == 1 else 'have'} the rest"] if running else []
    if first:
        parts.append(f"{_jobs(first)} {'comes' if len(first) == 1 else 'come'} first")
    return f"; {', and '.join(parts)}" if parts else ""


def _jobs(numbers: Sequence[int]) -> str:
    return f"{'job' if len(numbers) == 1 else 'jobs'} {', '.join(map(str, numbers))}"


def _amount(mib: int) -> str:
    """Return an amount of memory, rounded down to a tenth of a GiB."""
    return f"{mib} MiB" if mib < _GIB_MIB else f"{mib * 10 // _GIB_MIB / 10:g} GiB"


_LOCK = "claims.lock"  # file whose lock is held while a job takes its claim. Its contents mean nothing
_MIB = 1 << 20


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the lock of all claims in the block: read them, and record a new one."""
    path = jobs_folder(state) / _LOCK
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(journal.locked(path))
        except OSError as error:
            raise RetryLater(f"Cannot lock {path}: {error}.") from error
        yield


def may_need_claim(record: JobRecord) -> bool:
    """Return True if a job has not started, and needs a claim."""
    return record.state.job_state.status is JobStatus.PENDING and record.job.spec.needs_claim


def read_claims(records: Records, state: Path) -> Claims:
    """Return the claims of all jobs that have not ended, from their records."""
    found: dict[int, JobRecord] = {}
    claims: list[ResourceClaim] = []
    for number in records.numbers():
        try:
            record = records.get(number)
        except NotFound:
            continue  # a launch that has not completed
        except (Corrupt, Conflict):
            with contextlib.suppress(OSError):  # a strange folder costs no other job
                claims += _claims_of_nodes(number, job_folder(state, number))
            continue
        if record.job.engine == "local" and not record.state.job_state.status.is_final:
            found[number] = record
    started = [one for one in found.values() if one.state.job_state.status is not JobStatus.PENDING]
    claims += [_claim(one) for one in started]
    waiting = [one for one in found.values() if _is_waiting(one, found, records)]
    return replace(
        allocate(read_capacity(), claims, [(one.job.number, one.job.spec) for one in waiting]),
        holders=tuple(one.job.number for one in started),
        ports=frozenset(port for one in (*claims, *(one.job.spec for one in waiting)) for port in one.ports),
    )


def lead_on(records: Records, state: Path, *, besides: int | None = None) -> None:
    """Wake or start the controllers of the leading jobs, besides the job that calls this."""
    for number in read_claims(records, state).leading:
        if number != besides:
            rouse_controller(job_folder(state, number))


def _claim(record: JobRecord) -> ResourceClaim:
    spec, port = record.job.spec, record.state.port
    gpus = tuple(gpu for of_node in record.state.gpus for gpu in of_node)
    cpus, memory_mib = spec.cpus * spec.num_nodes, spec.memory_mib * spec.num_nodes
    ports = spec.ports if port is None else (*spec.ports, port)
    return ResourceClaim(record.job.number, gpus, cpus, memory_mib, ports)


def _is_waiting(record: JobRecord, found: Mapping[int, JobRecord], records: Records) -> bool:
    """Return True if a job needs a claim, and is next in its pipeline."""
    if not may_need_claim(record):
        return False
    after = record.job.spec.after
    if after is None:
        return True
    if after in found:
        return False
    try:
        return records.get(after).state.job_state.status is JobStatus.SUCCEEDED
    except (NotFound, Corrupt, Conflict):
        return False


def _claims_of_nodes(number: int, folder: JobFolder) -> Iterator[ResourceClaim]:
    """Yield the claims of a job's running nodes, whose record cannot be read."""
    attempt = folder.attempt(folder.last_attempt())
    for path in sorted(attempt.glob("[0-9]*")) if attempt.exists() else ():
        node = folder.node(int(attempt.name), int(path.name))
        if locks.is_held(node.lock):
            with contextlib.suppress(Corrupt, FileNotFoundError):
                plan = NodeSpec.read(node.plan)
                gpus = tuple(gpu for of_node in plan.gpus for gpu in of_node)
                yield ResourceClaim(number, gpus, ports=() if plan.port is None else (plan.port,))


def read_capacity() -> Capacity:
    """Return the CPUs of this process, and the memory of its control groups."""
    return Capacity(float(len(os.sched_getaffinity(0))), total_bytes() // _MIB)


_FIRST = 20_000
_NUM_PORTS = 10_000  # range of chosen ports. It is below those that Linux gives to outgoing connections
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_OPTION = re.compile(r"--(?:master|main[-_]process)[-_]port[ =]+[\"']?(\d{2,5})\b")
_ENDPOINT = re.compile(r"--rdzv[-_]endpoint[ =][^\n]*?:(\d{2,5})\b")
_ASSIGNED = re.compile(r"\bMASTER_PORT=[\"']?(\d{2,5})\b")
_MASTER_PORT = "MASTER_PORT"


def fixed_ports(commands: str, variables: Mapping[str, str]) -> tuple[int, ...]:
    """Return the rendezvous ports that commands or their variables name; pure."""
    text = _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), commands)
    named = [found[1] for pattern in (_OPTION, _ENDPOINT, _ASSIGNED) for found in pattern.finditer(text)]
    given = variables.get(_MASTER_PORT, "")
    named += [given] if given.isascii() and given.isdecimal() else []
    return tuple(sorted({int(port) for port in named}))


def needs_port(commands: str, num_nodes: int) -> bool:
    """Return True if a job is given a port: if it has several nodes or names the variable; pure."""
    return num_nodes > 1 or _MASTER_PORT in commands


def choose_port(folder: Path, taken: Collection[int]) -> int:
    """Return a port that no other job has, and that no program listens on."""
    # The search begins at a hash: jobs of other users, whose ports are not known here, may not listen yet.
    start = zlib.crc32(os.fsencode(folder))
    for offset in range(_NUM_PORTS):
        port = _FIRST + (start + offset) % _NUM_PORTS
        if port not in taken and _is_free(port):
            return port
    raise RetryLater(f"All ports from {_FIRST} to {_FIRST + _NUM_PORTS - 1} are in use on this machine.")


def _is_free(port: int) -> bool:
    """Return True if a process could listen on a port of all addresses."""
    family, address = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
