"""Allocation of a machine to jobs, for all machines and queues: no resource twice, and no job starved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.jobs.local.claims import Capacity, ResourceClaim, allocate
from holdfast.jobs.records import JobSpec

CAPACITY = Capacity(8.0, 64 << 10)
GPUS = ("0", "1", "2", "3", "4", "5", "GPU-x", "GPU-y")

Waiting = tuple[int, JobSpec]


def spec(num_nodes: int = 1, num_gpus: int = 0, **needs: Any) -> JobSpec:
    """Return the shape of a job."""
    return JobSpec(num_nodes, num_gpus, has_setup=False, user="me", **needs)


SPECS = st.builds(
    spec,
    num_nodes=st.integers(1, 3),
    num_gpus=st.integers(0, 2),
    priority=st.integers(-1, 1),
    devices=st.permutations(GPUS).map(lambda order: tuple(order[:6])),
    cpus=st.sampled_from((0.0, 0.5, 1.0, 3.0, 8.0, 100.0)),
    memory_mib=st.sampled_from((0, 1 << 10, 20 << 10, 64 << 10, 1 << 30)),
)
QUEUES = st.lists(SPECS, max_size=8).map(lambda found: list(enumerate(found, 1)))


def claim_of(waiting: Waiting, gpus: Iterable[Iterable[str]]) -> ResourceClaim:
    """Return the claim of a job that may start."""
    job, needs = waiting
    cpus = min(needs.cpus * needs.num_nodes, CAPACITY.cpus)
    memory_mib = min(needs.memory_mib * needs.num_nodes, CAPACITY.memory_mib)
    return ResourceClaim(job, tuple(gpu for of_node in gpus for gpu in of_node), cpus, memory_mib)


def check_claims(claims: list[ResourceClaim]) -> None:
    """Check that nothing is given twice, and no more than the machine has."""
    gpus = [gpu for one in claims for gpu in one.gpus]
    assert len(gpus) == len(set(gpus))
    assert sum(one.cpus for one in claims) <= CAPACITY.cpus + 1e-3
    assert sum(one.memory_mib for one in claims) <= CAPACITY.memory_mib


def start_all(
    claims: list[ResourceClaim], waiting: list[Waiting], order: st.DataObject | None = None
) -> tuple[list[ResourceClaim], list[Waiting]]:
    """Start the jobs that may start, each after a new look, in any order."""
    claims, waiting = list(claims), list(waiting)
    while ready := list(allocate(CAPACITY, claims, waiting).given):
        number = ready[0] if order is None else order.draw(st.sampled_from(ready))
        (chosen,) = [one for one in waiting if one[0] == number]
        claims.append(claim_of(chosen, allocate(CAPACITY, claims, waiting).given[number]))
        waiting.remove(chosen)
    return claims, waiting


@given(QUEUES)
def test_nothing_is_given_twice_and_each_node_has_what_it_asked_for(queue: list[Waiting]) -> None:
    found = allocate(CAPACITY, (), queue)
    assert found.given.keys() | found.shortages.keys() == set(dict(queue))
    assert all(found.shortages.values())
    started = [one for one in queue if one[0] in found.given]
    check_claims([claim_of(one, found.given[one[0]]) for one in started])
    for job, needs in started:
        gpus = found.given[job]
        assert [len(of_node) for of_node in gpus] == [needs.num_gpus] * needs.num_nodes
        assert {gpu for of_node in gpus for gpu in of_node} <= set(needs.devices)


@given(QUEUES, st.data())
def test_jobs_that_start_one_by_one_in_any_order_start_as_if_at_once(
    queue: list[Waiting], data: st.DataObject
) -> None:
    at_once = allocate(CAPACITY, (), queue).given
    claims, _ = start_all([], queue, data)
    assert {one.job for one in claims} == at_once.keys()
    assert {one.job: set(one.gpus) for one in claims} == {
        job: {gpu for of_node in gpus for gpu in of_node} for job, gpus in at_once.items()
    }


@pytest.mark.slow
@settings(max_examples=15)
@given(QUEUES, st.data())
def test_a_job_never_waits_for_one_that_comes_after_it(queue: list[Waiting], data: st.DataObject) -> None:
    """Jobs arrive and end in any order. A waiting one fits once those before it have ended."""
    claims: list[ResourceClaim] = []
    waiting: list[Waiting] = []
    arriving = [(job, replace(needs, priority=0)) for job, needs in queue]
    while arriving or waiting:
        if arriving and data.draw(st.booleans()):
            waiting.append(arriving.pop(0))
        elif claims:
            claims.remove(data.draw(st.sampled_from(claims)))
        claims, waiting = start_all(claims, waiting)
        check_claims(claims)
        for job, needs in waiting:
            later = [claim for claim in claims if claim.job > job]
            assert job in allocate(CAPACITY, later, [(job, needs)]).given
        assert claims or not waiting, "a machine without jobs runs the next one"


def test_the_reason_names_what_is_missing_and_who_has_it() -> None:
    queue = [
        (2, spec(num_gpus=4, devices=("0", "1", "2", "3"))),
        (3, spec(num_gpus=1, devices=("0", "1", "2", "3"))),
        (4, spec(cpus=6.0, memory_mib=60 << 10)),
        (5, spec(priority=1, cpus=1.0)),
        (6, spec()),
    ]
    found = allocate(CAPACITY, [ResourceClaim(1, ("0",), 2.0)], queue)
    assert found.given == {5: ((),), 6: ((),)}
    assert list(found.shortages.items()) == [
        (2, "waits for 4 GPUs (3 free); job 1 has the rest"),
        (3, "waits for 1 GPU (0 free); job 1 has the rest, and job 2 comes first"),
        (4, "waits for 6 CPUs (5 free); jobs 1, 5 have the rest"),
    ]


def test_needs_beyond_the_machine_mean_all_of_it() -> None:
    all_of_it = (2, spec(cpus=1000.0, memory_mib=1 << 40))
    assert 2 in allocate(CAPACITY, (), [all_of_it]).given
    assert allocate(CAPACITY, [ResourceClaim(1, (), 0.5, 1)], [all_of_it]).shortages == {
        2: "waits for 8 CPUs (7.5 free) and 64 GiB of memory (63.9 GiB free); job 1 has the rest"
    }
