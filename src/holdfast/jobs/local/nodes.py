"""Nodes of one attempt on this machine, as process trees: specified, started or adopted, notified, killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.jobs.environment import container_base, tag
from holdfast.jobs.folder import JobFolder, NodeFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.preparation import make_node_spec
from holdfast.jobs.node.processes import AGENT, Process
from holdfast.jobs.node.roles import STOPPED, spawn
from holdfast.jobs.node_spec import NodeSpec, read_environment, read_outcome
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.records import JobRecord
from holdfast.jobs.state_machine import JobState
from holdfast.system.linux import locks
from holdfast.watch.preemption.sources import Notice, write_notice

_SWEEP_S = 60.0  # time limit for killing processes that do not disappear


class _Node(Struct):
    folder: NodeFolder
    agent: Process | None = None  # None: exited, or not yet known
    fd: int | None = None  # pidfd of the agent
    outcome: Outcome | None = None

    def watch(self, agent: Process | None) -> None:
        """Begin to watch the agent."""
        self.agent, self.fd = agent, None if agent is None else processes.open_pidfd(agent)

    def let_go(self) -> None:
        """Stop watching."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self.agent is not None:
            with contextlib.suppress(ChildProcessError):  # an adopted agent is not a child
                os.waitpid(self.agent.pid, os.WNOHANG)


class Nodes:
    """Nodes of an attempt. A new controller finds their state in their folders."""

    def __init__(self, folder: JobFolder, task_id: str, attempt: int, num_nodes: int) -> None:
        self._folder = folder
        self._task_id = task_id
        self._attempt = attempt
        self._nodes = [_Node(folder.node(attempt, rank)) for rank in range(num_nodes)]
        self.is_killed = False  # the attempt was killed here. Its agents report that

    def close(self) -> None:
        """Stop watching."""
        for node in self._nodes:
            node.let_go()

    def start(self, make_specs: list[NodeSpec]) -> None:
        """Start the agents of all nodes that do not have one yet."""
        for node, plan in zip(self._nodes, make_specs, strict=True):
            if not node.folder.plan.exists():
                node.watch(processes.find(_start(node.folder, plan)))

    def fds(self) -> list[int]:
        """Return descriptors that become readable when an agent exits."""
        return [node.fd for node in self._nodes if node.fd is not None]

    def poll(self, killed_unix_s: float | None) -> None:
        """Update the outcome of each node. Failures after `killed_unix_s` were caused by the kill."""
        for node in self._nodes:
            if node.outcome is None:
                self._poll_node(node, killed_unix_s)

    def _poll_node(self, node: _Node, killed_unix_s: float | None) -> None:
        is_alive = locks.is_held(node.folder.lock)  # first, as the outcome is written under the lock
        if is_alive and node.agent is None:
            found = processes.of_role(AGENT, node.folder.path)
            pids = {process.pid for process in found}  # its children have its command line until they exec
            node.watch(next((process for process in found if process.parent not in pids), None))
        outcome = read_outcome(node.folder.ended)
        if outcome is None and not is_alive:
            outcome = Outcome(Phase.RUN if node.folder.running.exists() else Phase.SETUP)
        if outcome is None:
            return
        if not (outcome.is_success or outcome.is_lost or killed_unix_s is None):
            # Within the resolution of timestamps, a failure after the kill was caused by it.
            is_after = node.folder.ended.stat().st_mtime >= killed_unix_s - 0.01
            outcome = replace(outcome, is_stopped=is_after)
        node.outcome = outcome
        node.let_go()

    @property
    def has_unknown(self) -> bool:
        """True if an agent is about to run or to end: it has its lock, but not yet its own command line."""
        return any(node.outcome is None and node.agent is None for node in self._nodes)

    @property
    def have_run(self) -> bool:
        """True if every node has started `run`."""
        return all(node.folder.running.exists() for node in self._nodes)

    def outcomes(self) -> Mapping[int, Outcome]:
        """Return the outcomes of the nodes that have exited."""
        return {rank: node.outcome for rank, node in enumerate(self._nodes) if node.outcome is not None}

    def notify(self, source: str, deadline_unix_s: float) -> int:
        """Send every node a notice, as a file and SIGTERM. Return how many processes handle SIGTERM."""
        notice = Notice(source, deadline_unix_s=deadline_unix_s)
        for node in self._nodes:
            if node.outcome is None:
                with contextlib.suppress(FileNotFoundError):  # the node was never started
                    write_notice(node.folder.notice, notice)
        agents = [one.agent for one in self._nodes if one.agent is not None and one.outcome is None]
        listening = [process for agent in agents for process in processes.topmost_handlers(agent.pid)]
        return sum(processes.send(process, signal.SIGTERM) for process in listening)

    def kill(self, *, with_keepers: bool) -> None:
        """Kill all processes of the attempt except the agents, which report that and exit."""
        self.is_killed = True
        with contextlib.suppress(FileNotFoundError):  # nothing was started
            (self._folder.attempt(self._attempt) / STOPPED).touch()  # for agents that wait for their mounts
        deadline = time.monotonic() + _SWEEP_S
        while (left := self.left(with_keepers=with_keepers)) and time.monotonic() < deadline:
            processes.kill(left)

    def left(self, *, with_keepers: bool = False) -> list[Process]:
        """Return the running processes of the attempt without agents, and without keepers unless included."""
        table = processes.snapshot()
        found = {one.pid: one for one in processes.tagged(tag(self._task_id, self._attempt), table)}
        agents = {node.agent.pid for node in self._nodes if node.agent is not None}
        for pid in (*(agents & table.keys()), os.getpid()):  # children of a dead agent are reparented to us
            found.update((one.pid, one) for one in processes.descendants(pid, table))
        return [
            one
            for one in found.values()
            if one.pid not in agents and one.pid != os.getpid() and (with_keepers or not one.exits_by_itself)
        ]

    def have_keepers(self) -> bool:
        """Return True if keepers or uploaders of the attempt are still running."""
        return any(one.is_keeper for one in self.left(with_keepers=True))


def _start(folder: NodeFolder, plan: NodeSpec) -> int:
    """Start an agent, and return its pid. It holds its lock from the start."""
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = locks.acquire(folder.lock)
    assert lock is not None, "no other process starts the agents of this job"
    try:
        write_document(folder.plan, plan)  # from here on the node exists, with its lock held
        return spawn(AGENT, folder.path, Path(plan.log), lock=lock)
    finally:
        os.close(lock)


def addresses(num_nodes: int, job: int) -> tuple[str, ...]:
    """Return loopback addresses of the nodes, by rank. Jobs of several nodes have addresses of their own."""
    if num_nodes == 1:
        return ("127.0.0.1",)
    # Numbers that are 65024 apart share their addresses, and so do some of jobs with more than 254 nodes.
    blocks = [(job + rank // 254) % (254 * 256) for rank in range(num_nodes)]
    return tuple(
        f"127.{1 + block // 256}.{block % 256}.{1 + rank % 254}" for rank, block in enumerate(blocks)
    )


def make_specs(record: JobRecord, job_state: JobState, folder: JobFolder) -> list[NodeSpec]:
    """Return the specifications of an attempt's nodes, by rank."""
    job, spec = record.job, record.job.spec
    environment = read_environment(folder)
    if spec.image:
        environment = replace(environment, base=container_base(environment.base))
    why = f", after: {job_state.reason}" if job_state.reason else ""
    return [
        make_node_spec(
            folder,
            job,
            job_state.attempt,
            rank,
            addresses(spec.num_nodes, job.number),
            environment,
            wakeup=folder.wakeup,
            set_up=folder.set_up(rank),
            num_gpus=spec.num_gpus,
            where=(f" on node {rank}" if spec.num_nodes > 1 else "") + why,
            gpus=record.state.gpus,
            port=record.state.port,
        )
        for rank in range(spec.num_nodes)
    ]
