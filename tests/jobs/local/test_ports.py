"""Ports and addresses of jobs with several nodes: two of them at the same time do not meet."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from holdfast.jobs.local.claims import choose_port, fixed_ports, needs_port
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

JOB = Path("/home/a/.local/state/holdfast/jobs/77")
MEET = """
import os, pathlib, sys
import torch, torch.distributed as dist
folder, mine, other = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
total = torch.tensor([mine])
dist.all_reduce(total)
if dist.get_rank() == 0:
    # Blocks until the other job opens the pipe too: both groups exist at the same time.
    (folder / "together").open("w" if mine < other else "r").close()
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.barrier()
os._exit(0)
"""
RUN = """
    {python} -m torch.distributed.run --nnodes $SKYPILOT_NUM_NODES --node_rank $SKYPILOT_NODE_RANK \\
      --nproc_per_node 1 --master_addr $(echo "$SKYPILOT_NODE_IPS" | head -n 1) {port} \\
      {script} {folder} {mine} {other}
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_two_trainings_with_two_nodes_run_at_the_same_time(harness: JobHarness) -> None:
    """One names its port as the guide does. The other leaves it to torchrun, with one default for all."""
    script = harness.folder / "meet.py"
    script.write_text(MEET)
    os.mkfifo(harness.folder / "together")
    jobs = {}
    for mine, port in {1: "--master_port ${MASTER_PORT:-29500}", 10: ""}.items():
        facts = {"python": sys.executable, "script": script, "folder": harness.folder}
        run = RUN.format(**facts, port=port, mine=mine, other=11 - mine)
        jobs[mine] = harness.submit(run, head="num_nodes: 2")
    for mine, job in jobs.items():
        harness.succeed(job)
        for node in range(2):
            assert f"sum {4 * mine}\n" in harness.log(job, node)


def test_jobs_at_the_same_time_have_different_ports_and_addresses(harness: JobHarness) -> None:
    show = 'echo "at $MASTER_PORT $PET_MASTER_PORT" $SKYPILOT_NODE_IPS; until [ -e $GO ]; do sleep 0.05; done'
    jobs = [harness.submit(show, head="num_nodes: 2", GO=str(harness.folder / "go")) for _ in range(2)]
    lines: list[list[str]] = []
    for job in jobs:
        for node in range(2):
            harness.wait_for_output(job, "at ", node=node)
        logs = [harness.log(job, node).split("at ")[1].splitlines()[0].split() for node in range(2)]
        assert logs[0] == logs[1]
        assert logs[0][0] == logs[0][1]
        lines.append(logs[0])
    assert set(lines[0]).isdisjoint(lines[1])
    (harness.folder / "go").touch()
    first = harness.record(jobs[0])
    harness.wait(jobs[0])
    assert harness.record(jobs[0]).state.port == first.state.port == int(lines[0][0])


def test_a_job_that_names_a_port_waits_until_no_other_job_has_it(harness: JobHarness) -> None:
    go = harness.folder / "go"
    run = "until [ -e $GO ]; do sleep 0.05; done; : torchrun --master_port 29511 train.py"
    first = harness.submit(run, GO=str(go))
    harness.wait(first, JobStatus.RUNNING)
    second = harness.submit("echo second: --rdzv_endpoint localhost:$PORT", PORT="29511")
    assert (second.status, second.reason) == (JobStatus.PENDING, f"waits for port 29511 of job {first.id}")
    go.touch()
    harness.succeed(second)


@pytest.mark.parametrize(
    ("commands", "ports"),
    [
        ("torchrun --master_port 29500 a.py", (29500,)),
        (
            "torchrun --master-port=29500 a.py; accelerate launch --main_process_port '8008' b.py",
            (8008, 29500),
        ),
        ("torchrun --rdzv_endpoint=$(echo $IPS | head -n 1):1234 a.py", (1234,)),
        ("export MASTER_PORT=12355", (12355,)),
        ("torchrun --master_port $PORT a.py; torchrun --master_port ${PORT} b.py", (7000,)),
        ("torchrun --master_port ${MASTER_PORT:-29500} a.py", ()),
        ("torchrun --standalone a.py; curl localhost:8080; torchrun --rdzv_endpoint localhost:0", ()),
    ],
)
def test_ports_are_found_in_commands(commands: str, ports: tuple[int, ...]) -> None:
    assert fixed_ports(commands, {"PORT": "7000"}) == ports


def test_a_port_in_the_variables_counts_and_one_is_given_where_it_is_asked_for() -> None:
    assert fixed_ports("python train.py", {"MASTER_PORT": "5000", "LR": "1"}) == (5000,)
    assert fixed_ports("python train.py", {"MASTER_PORT": "x"}) == ()
    assert needs_port("python train.py", 2)
    assert needs_port("python train.py --port $MASTER_PORT", 1)
    assert not needs_port("python train.py", 1)


def test_a_port_on_which_a_program_listens_is_not_chosen() -> None:
    port = choose_port(JOB, ())
    assert choose_port(JOB, {port}) != port
    with socket.create_server(("127.0.0.3", port)):
        assert choose_port(JOB, ()) != port


def test_jobs_of_two_users_with_the_same_number_begin_with_different_ports() -> None:
    """They may start at the same time, before either listens."""
    assert choose_port(JOB, ()) == choose_port(JOB, ())
    assert choose_port(JOB, ()) != choose_port(Path("/home/b/.local/state/holdfast/jobs/77"), ())
