"""Allocation of this machine's GPUs, CPUs, memory and ports to waiting jobs; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.system.units import plural

Devices = tuple[tuple[str, ...], ...]
"""GPUs of each node of a job, by rank."""

_GIB_MIB = 1024
_ROUNDING = 1e-6
"""Tolerance of sums of parts of CPUs."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """CPUs and memory of a machine."""

    cpus: float
    memory_mib: int


@dataclass(frozen=True, slots=True)
class ResourceClaim:
    """Resources of a job that has started and not ended."""

    job: int
    gpus: tuple[str, ...] = ()
    cpus: float = 0.0
    memory_mib: int = 0
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources that a job needs for its start."""

    job: int
    priority: int = 0  # jobs with a greater one come first
    num_nodes: int = 1
    gpus_per_node: int = 0
    devices: tuple[str, ...] = ()  # GPUs that the job may have
    cpus: float = 0.0  # of all its nodes
    memory_mib: int = 0  # of all its nodes
    ports: tuple[int, ...] = ()  # that its commands name
    needs_port: bool = False  # any other port too

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def is_empty(self) -> bool:
        """True if the job needs nothing that is divided among jobs."""
        return not (self.num_gpus or self.cpus or self.memory_mib or self.ports or self.needs_port)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Jobs that may start now, and why the others wait."""

    given: Mapping[int, Devices] = field(default_factory=dict)  # GPUs of the jobs that may start, by job
    shortages: Mapping[int, str] = field(default_factory=dict)  # why a job waits, by job, first come first


def allocate(capacity: Capacity, claims: Iterable[ResourceClaim], demands: Iterable[Demand]) -> Allocation:
    """Return which jobs may start beside those that have started.

    Jobs are served by priority, then by number. One that does not fit keeps what is free of its needs, so
    that later ones start only with what it does not need. Needs beyond the machine count as all of it, except
    for GPUs.
    """
    machine = _Machine(capacity, claims)
    given: dict[int, Devices] = {}
    shortages: dict[int, str] = {}
    for demand in sorted(demands, key=lambda one: (-one.priority, one.job)):
        shortage = machine.shortage(demand)
        gpus = machine.take(demand, is_waiting=bool(shortage))
        if shortage:
            shortages[demand.job] = shortage
        else:
            given[demand.job] = _by_node(gpus, demand)
    return Allocation(given, shortages)


def _by_node(gpus: Sequence[str], demand: Demand) -> Devices:
    each = demand.gpus_per_node
    return tuple(tuple(gpus[rank * each : (rank + 1) * each]) for rank in range(demand.num_nodes))


class _Machine:
    """Resources of a machine while they are divided."""

    def __init__(self, capacity: Capacity, claims: Iterable[ResourceClaim]) -> None:
        self._capacity = capacity
        self._taken = list(claims)
        self._waiting: set[int] = set()  # jobs that wait, and keep what they have taken

    def shortage(self, demand: Demand) -> str:
        """Return why a job must wait, for people. Empty if it fits."""
        needs: list[str] = []
        users: set[int] = set()
        free_gpus = self._free_gpus(demand)
        if len(free_gpus) < demand.num_gpus:
            needs.append(f"{plural(demand.num_gpus, 'GPU')} ({len(free_gpus)} free)")
            users |= {one.job for one in self._taken if set(one.gpus) & set(demand.devices)}
        cpus, memory_mib = self._needs(demand)
        if cpus > self._free_cpus() + _ROUNDING:
            needs.append(f"{_cpus(cpus)} ({self._free_cpus():g} free)")
            users |= {one.job for one in self._taken if one.cpus}
        if memory_mib > self._free_memory_mib():
            needs.append(f"{_amount(memory_mib)} of memory ({_amount(self._free_memory_mib())} free)")
            users |= {one.job for one in self._taken if one.memory_mib}
        needs += [
            f"port {port} of job {one.job}"
            for port in demand.ports
            for one in self._taken
            if port in one.ports
        ]
        return f"waits for {' and '.join(needs)}{self._who(users)}" if needs else ""

    def take(self, demand: Demand, *, is_waiting: bool) -> list[str]:
        """Take what a job needs, or of that what is free, and return its GPUs."""
        gpus = self._free_gpus(demand)[: demand.num_gpus]
        cpus, memory_mib = self._needs(demand)
        cpus, memory_mib = min(cpus, self._free_cpus()), min(memory_mib, self._free_memory_mib())
        self._taken.append(ResourceClaim(demand.job, tuple(gpus), cpus, memory_mib, demand.ports))
        if is_waiting:
            self._waiting.add(demand.job)
        return gpus

    def _needs(self, demand: Demand) -> tuple[float, int]:
        return min(demand.cpus, self._capacity.cpus), min(demand.memory_mib, self._capacity.memory_mib)

    def _free_gpus(self, demand: Demand) -> list[str]:
        taken = {gpu for one in self._taken for gpu in one.gpus}
        return [gpu for gpu in dict.fromkeys(demand.devices) if gpu not in taken]

    def _free_cpus(self) -> float:
        return max(0.0, self._capacity.cpus - sum(one.cpus for one in self._taken))

    def _free_memory_mib(self) -> int:
        return max(0, self._capacity.memory_mib - sum(one.memory_mib for one in self._taken))

    def _who(self, users: set[int]) -> str:
        """Return which jobs have, or get first, what another one needs."""
        running, first = sorted(users - self._waiting), sorted(users & self._waiting)
        parts = [f"{_jobs(running)} {'has' if len(running) == 1 else 'have'} the rest"] if running else []
        if first:
            parts.append(f"{_jobs(first)} {'comes' if len(first) == 1 else 'come'} first")
        return f"; {', and '.join(parts)}" if parts else ""


def _jobs(numbers: Sequence[int]) -> str:
    return f"{'job' if len(numbers) == 1 else 'jobs'} {', '.join(map(str, numbers))}"


def _cpus(number: float) -> str:
    return f"{number:g} CPU{'' if number == 1 else 's'}"


def _amount(mib: int) -> str:
    """Return an amount of memory, rounded down to a tenth of a GiB."""
    return f"{mib} MiB" if mib < _GIB_MIB else f"{mib * 10 // _GIB_MIB / 10:g} GiB"
