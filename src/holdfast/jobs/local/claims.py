"""Claims of jobs to parts of this machine, found in the records of all jobs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import Conflict, Corrupt, NotFound, RetryLater
from holdfast.jobs import journal
from holdfast.jobs.folder import JobFolder, job_folder, jobs_folder
from holdfast.jobs.job_numbers import job_numbers
from holdfast.jobs.local.allocation import Allocation, Capacity, Demand, ResourceClaim, allocate
from holdfast.jobs.node.roles import rouse_controller
from holdfast.jobs.node_spec import NodeSpec
from holdfast.jobs.record_files import JobSpec
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.status import JobStatus
from holdfast.system.host_memory import total_bytes
from holdfast.system.linux import locks

_LOCK = "claims.lock"
"""File whose lock is held while a job takes its claim. Its contents mean nothing."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims of all jobs on this machine, and the jobs that wait for theirs.

    Attributes:
        holders: jobs that have started and not ended, whatever they need.
        allocation: jobs that may start now, and why the others wait.
        ports: ports of the jobs that have started, and those that waiting ones name.
    """

    holders: tuple[int, ...] = ()
    allocation: Allocation = field(default_factory=Allocation)
    ports: frozenset[int] = frozenset()

    @property
    def leading(self) -> tuple[int, ...]:
        """Jobs that may start now, and the first of those that wait. Only these need a controller."""
        return (*self.allocation.given, *list(self.allocation.shortages)[:1])

    def shortage(self, number: int) -> str:
        """Return why a job waits, for people. Empty if it may start, or needs nothing."""
        return self.allocation.shortages.get(number, "")


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the lock of all claims in the block: read them, and record a new one.

    Blocks: while another job takes its claim.
    """
    path = jobs_folder(state) / _LOCK
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(journal.locked(path))
        except OSError as error:
            raise RetryLater(f"Cannot lock {path}: {error}.") from error
        yield


def demand(number: int, spec: JobSpec) -> Demand:
    """Return the resources that a job needs for its start."""
    return Demand(
        job=number,
        priority=spec.priority,
        num_nodes=spec.num_nodes,
        gpus_per_node=spec.num_gpus if spec.devices else 0,
        devices=spec.devices,
        cpus=spec.cpus * spec.num_nodes,
        memory_mib=spec.memory_mib * spec.num_nodes,
        ports=spec.ports,
        needs_port=spec.needs_port,
    )


def may_need_claim(record: JobRecord) -> bool:
    """Return True if a job has not started, and needs a claim."""
    return record.job_state.status is JobStatus.PENDING and not demand(record.id, record.spec).is_empty


def read_claims(records: Records, state: Path) -> Claims:
    """Return the claims of all jobs that have not ended, from their records."""
    found: dict[int, JobRecord] = {}
    claims: list[ResourceClaim] = []
    for number in job_numbers(jobs_folder(state)):
        try:
            record = records.get(number)
        except NotFound:
            continue  # a launch that has not completed
        except (Corrupt, Conflict):
            with contextlib.suppress(OSError):  # a strange folder costs no other job
                claims += _claims_of_nodes(number, job_folder(state, number))
            continue
        if record.engine == "local" and not record.job_state.status.is_final:
            found[number] = record
    started = [one for one in found.values() if one.job_state.status is not JobStatus.PENDING]
    claims += [_claim(one) for one in started]
    waiting = [one for one in found.values() if _is_waiting(one, found, records)]
    demands = [demand(one.id, one.spec) for one in waiting]
    return Claims(
        holders=tuple(one.id for one in started),
        allocation=allocate(read_capacity(), claims, demands),
        ports=frozenset(port for one in (*claims, *demands) for port in one.ports),
    )


def lead_on(records: Records, state: Path, *, besides: int | None = None) -> None:
    """Wake or start the controllers of the leading jobs.

    Args:
        besides: job whose controller calls this.
    """
    for number in read_claims(records, state).leading:
        if number != besides:
            rouse_controller(job_folder(state, number))


def _claim(record: JobRecord) -> ResourceClaim:
    needs = demand(record.id, record.spec)
    gpus = tuple(gpu for of_node in record.gpus for gpu in of_node)
    ports = needs.ports if record.port is None else (*needs.ports, record.port)
    return ResourceClaim(record.id, gpus, needs.cpus, needs.memory_mib, ports)


def _is_waiting(record: JobRecord, found: Mapping[int, JobRecord], records: Records) -> bool:
    """Return True if a job needs a claim, and is next in its pipeline."""
    if not may_need_claim(record):
        return False
    after = record.spec.after
    if after is None:
        return True
    if after in found:
        return False
    try:
        return records.get(after).job_state.status is JobStatus.SUCCEEDED
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
