"""The controller of a Slurm job, on its first node: tells the machine what happens, does what it answers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.entry import command
from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.due import Due
from holdfast.jobs.following import tail
from holdfast.jobs.machine import (
    Begin,
    Broke,
    Cancel,
    Ended,
    Event,
    Gone,
    Life,
    Notice,
    Ran,
    Told,
    Waited,
    advance,
)
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.slurm import commands
from holdfast.jobs.slurm.messages import (
    EndedNode,
    Here,
    Inbox,
    KillNode,
    Message,
    Noticed,
    Running,
    TellNode,
    ToldNode,
    write,
)
from holdfast.jobs.slurm.papers import Asked, Papers
from holdfast.jobs.slurm.runner import KILL_WAIT_S
from holdfast.jobs.status import Status
from holdfast.surroundings import read_progress

_LOOK_S = 1.0
"""How often the controller looks what is asked of it: a file on a shared file system wakes nobody."""
_STUBBORN_S = 30.0
"""How long nodes may take to end what they were told to end, before Slurm does it."""
_MAX_SILENT = 3
_LAST_LINES = 10
_AGAIN_S = 5.0
_PATIENCE = 60
"""How often Slurm is asked something that has to be answered."""
FAILED = 1
_T = TypeVar("_T")


def look_after(folder: JobFolder) -> int:
    """Look after a job while it has this allocation; exit status of its batch script.

    Blocks: until the job has ended, or Slurm was asked to start it again.
    """
    papers = Papers(folder)
    found = Controller(papers)
    try:
        found.serve()
    except Exception as error:  # noqa: BLE001 - it is told, to the log and as the job's status
        traceback.print_exc()
        why = f"{error if isinstance(error, HoldfastError) else repr(error)} (see {papers.output})"
        found.give_up(why)
    return 0 if found.life.status is Status.SUCCEEDED else FAILED


class Controller:
    """The one process that writes down where the job stands.

    Args:
        papers: of the job.
    """

    def __init__(self, papers: Papers) -> None:
        self._papers = papers
        self._facts = papers.facts()
        self._story = papers.story()
        self._slurm_id = os.environ.get("SLURM_JOB_ID", "")
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._due = Due()
        self._step: _Step | None = None
        self._listening: dict[int, int] = {}  # by node: processes that were told
        self._running: set[int] = set()  # nodes that have come to `run`
        self._has_heard = False  # any node has said a word in this attempt
        self._signals: list[int] = []
        self._is_leaving = False

    @property
    def life(self) -> Life:
        """Where the job stands."""
        return self._story.life

    def serve(self) -> None:
        """Until the job has ended, or is to be started again elsewhere.

        Blocks: on signals, on what nodes say, and on the next deadline.
        """
        woken = self._hear_signals()
        self._take_over()
        while not self.life.status.is_final and not self._is_leaving:
            self._do_what_is_due()
            self._wait(woken)
            self._see()

    def give_up(self, why: str) -> None:
        """Something here is broken: end the job rather than leave it unwatched."""
        if self._step is not None:
            with contextlib.suppress(HoldfastError):
                commands.kill_steps(self._slurm_id)
            self._step.close()
        self._apply(Broke(why))

    # -- taking over -----------------------------------------------------------------------------------------

    def _hear_signals(self) -> socket.socket:
        """A socket that becomes readable with each signal."""
        woken, wakes = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        self._wakes = wakes
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: self._signals.append(number))
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        return woken

    def _take_over(self) -> None:
        """Go on from where the controller before this one was, in whichever allocation that was."""
        assert self._story.restart <= self._restart, "Slurm has started the job again elsewhere"
        self._story = dataclasses.replace(self._story, restart=self._restart, slurm_id=self._slurm_id)
        if self.life.is_active:  # its machines went before it could say so
            self._apply(Gone(self.life.attempt, self._has_advanced()))
        self._answer()
        if not self.life.status.is_final:
            self._apply(Begin() if self.life.status is Status.PENDING else Waited())

    # -- the machine -----------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        """Take an event to the machine; what it answers is written down before anything is done about it."""
        before = self.life
        life, orders = advance(before, event, self._facts.terms)
        life = self._with_last_words(life)
        now_s = time.time()
        self._due = self._due.plus(orders, now_s)
        if life.attempt != before.attempt:
            self._listening, self._running, self._has_heard = {}, set(), False
            self._story = dataclasses.replace(self._story, step_before=self._newest_step())
        if life == before:
            return
        self._story = dataclasses.replace(
            self._story,
            life=life,
            started_unix_s=self._story.started_unix_s or (now_s if life.attempt else None),
            ended_unix_s=now_s if life.status.is_final else None,
        )
        self._save()
        if (life.status, life.attempt, life.reason) != (before.status, before.attempt, before.reason):
            self._tell_followers()

    def _save(self) -> None:
        """Write down where the job stands, unless Slurm has started it elsewhere: then that one does."""
        if self._papers.story().restart > self._restart:
            raise SystemExit(FAILED)
        self._papers.write_story(self._story)

    def _with_last_words(self, life: Life) -> Life:
        """With the last lines of the log, if the job has failed just now: why is mostly told there."""
        if life.status not in (Status.FAILED, Status.FAILED_SETUP) or life.status is self.life.status:
            return life
        ranks = [rank for rank, one in sorted(life.outcomes.items()) if not one.is_success] or [0]
        lines = "\n".join(f"  {line}" for line in tail(self._papers.job.log(ranks[0]), _LAST_LINES))
        reason = f"{life.reason}\nThe last lines of node {ranks[0]}:\n{lines}" if lines else life.reason
        return dataclasses.replace(life, reason=reason)

    def _tell_followers(self) -> None:
        reason = self.life.reason.partition("\n")[0]
        line = f"attempt {self.life.attempt} {self.life.status.value} {reason}".rstrip()
        with self._papers.job.changed.open("a") as file:
            file.write(f"{time.strftime('%F %T')} {line}\n")

    def _newest_step(self) -> int | None:
        return max(read_progress(self._papers.job.progress).values(), default=None)

    def _has_advanced(self) -> bool | None:
        """True if a newer checkpoint is known than when the attempt began; None if none ever was."""
        step, before = self._newest_step(), self._story.step_before
        return None if step is None else before is None or step > before

    # -- doing -----------------------------------------------------------------------------------------------

    def _do_what_is_due(self) -> None:
        now_s = time.time()
        if self._due.start is not None and self._step is None:
            self._step = _Step(self._papers, self._due.start, self._facts.num_nodes)
            self._due = dataclasses.replace(self._due, start=None)
        if self._step is None:
            if self._due.wake_unix_s is not None and now_s >= self._due.wake_unix_s:
                self._apply(Waited())
            return
        if self._due.tell_until_unix_s is not None:
            self._step.say(TellNode(self._due.tell_source, self._due.tell_until_unix_s))
            self._due = dataclasses.replace(self._due, tell_until_unix_s=None)
        if self._due.kill_unix_s is not None and now_s >= self._due.kill_unix_s:
            self._step.kill(with_keepers=self._due.kill_keepers)
            if now_s >= self._due.kill_unix_s + self._grace_s() + _STUBBORN_S:
                commands.kill_steps(self._slurm_id)

    def _grace_s(self) -> float:
        """How long runners wait for keepers after all else has ended."""
        return 0.0 if self._due.kill_keepers else self._facts.terms.grace_s

    # -- seeing ----------------------------------------------------------------------------------------------

    def _wait(self, woken: socket.socket) -> None:
        poll = select.poll()
        poll.register(woken.fileno(), select.POLLIN)
        if self._step is not None:
            poll.register(self._step.fd, select.POLLIN)
        poll.poll(_LOOK_S * 1000)
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)

    def _see(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            lead_s = self._facts.terms.grace_s if number == signal.SIGUSR1 else KILL_WAIT_S
            self._notice(f"Slurm ({signal.Signals(number).name})", lead_s)
        self._answer()
        if self._step is None:
            return
        for message in self._step.hear():
            self._take(message)
        if self._step.has_ended:
            self._end_attempt()

    def _notice(self, source: str, lead_s: float) -> None:
        if not self.life.is_active and not self.life.status.is_final:
            self._leave()  # between two attempts: nothing has to be saved
        elif not self.life.is_noticed:
            self._apply(Notice(lead_s, source))

    def _answer(self) -> None:
        """Do what was asked of the job since the last look."""
        asked = self._papers.asked()[self._story.num_answered :]
        for one in asked:
            self._story = dataclasses.replace(self._story, num_answered=self._story.num_answered + 1)
            self._apply(_event(one))
            self._save()

    def _take(self, message: Message) -> None:
        attempt = self.life.attempt
        self._has_heard = True
        if isinstance(message, Running):
            self._running.add(message.node)
            if len(self._running) == self._facts.num_nodes:
                self._apply(Ran(attempt))
        elif isinstance(message, Noticed):
            self._notice(message.source, message.lead_s)
        elif isinstance(message, ToldNode):
            self._listening[message.node] = message.num_listening
            if len(self._listening.keys() | self.life.outcomes.keys()) == self._facts.num_nodes:
                self._apply(Told(attempt, sum(self._listening.values())))
        elif isinstance(message, EndedNode):
            self._apply(Ended(attempt, message.node, message.outcome()))
        elif not isinstance(message, Here):
            sys.stderr.write(f"not for the controller: {message}\n")

    def _end_attempt(self) -> None:
        """No process of it is left: srun has ended."""
        assert self._step is not None
        self._step.close()
        self._step = None
        before = self.life
        if not self._has_heard and not before.is_noticed:
            self._count_silence()
        else:
            self._story = dataclasses.replace(self._story, num_silent=0)
        if self.life.status.is_final:
            return
        self._apply(Gone(before.attempt, self._has_advanced()))
        if self.life.status is Status.RECOVERING and _is_for_other_machines(before, self._facts.num_nodes):
            self._leave()

    def _count_silence(self) -> None:
        """An attempt in which no node said a word is no lost machine if it happens again and again."""
        silent = self._story.num_silent + 1
        self._story = dataclasses.replace(self._story, num_silent=silent)
        if silent >= _MAX_SILENT:
            self._apply(Broke(f"srun could not start the nodes, {silent} times (see {self._papers.output})"))

    def _leave(self) -> None:
        """Have Slurm start the job again, on machines that it finds then."""
        self._is_leaving = True
        self._save()
        if any(one.is_lost for one in _outcomes(self.life, self._facts.num_nodes)):
            commands.sweep(self._facts.num_nodes, self._papers.job.path)
        # Whoever has ended the job in Slurm has the last word: a requeue would undo even a person's scancel.
        # Where Slurm itself has put it back into the queue, it is not running any more either.
        if _patiently(lambda: _is_running(self._slurm_id)):
            _patiently(lambda: commands.requeue(self._slurm_id))


class _Step:
    """One srun: the nodes of one attempt."""

    def __init__(self, papers: Papers, attempt: int, num_nodes: int) -> None:
        folder = papers.job
        # Made here, once, since other nodes may long believe that it is not there.
        folder.attempt(attempt).mkdir(mode=0o700, parents=True, exist_ok=True)
        addresses = commands.addresses(os.environ["SLURM_JOB_NODELIST"])
        # srun takes what the job has, but for CPUs per task, which it must be told (from 22.05 on).
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        self._srun = subprocess.Popen(
            [
                "srun",
                f"--nodes={num_nodes}",
                f"--ntasks={num_nodes}",
                "--ntasks-per-node=1",
                *([f"--cpus-per-task={cpus}"] if cpus else []),
                "--kill-on-bad-exit=1",  # a runner never fails: it was killed, and its peers wait in vain
                "--wait=0",
                "--unbuffered",
                *command(
                    "holdfast.jobs.slurm", "runner", str(folder.path), str(attempt), ",".join(addresses)
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # srun would pass a signal on, or end all
        )
        assert self._srun.stdin is not None
        assert self._srun.stdout is not None
        self._in, self._out = self._srun.stdin, self._srun.stdout
        self._inbox = Inbox()
        self._killed: KillNode | None = None
        self.has_ended = False
        """No runner is left."""

    @property
    def fd(self) -> int:
        """Readable when a node has said something."""
        return self._out.fileno()

    def hear(self) -> Iterator[Message]:
        """What nodes have said since the last call."""
        if not select.select([self._out], [], [], 0)[0]:
            return
        data = os.read(self._out.fileno(), 1 << 16)
        if not data:
            self._srun.wait()
            self.has_ended = True
        yield from self._inbox.take(data)
        for line in self._inbox.others:
            sys.stderr.write(f"{line}\n")
        self._inbox.others.clear()

    def say(self, message: Message) -> None:
        """Say something to all nodes."""
        with contextlib.suppress(OSError):
            os.write(self._in.fileno(), write(message))

    def kill(self, *, with_keepers: bool) -> None:
        """Have the nodes end all they have; said once."""
        order = KillNode(with_keepers)
        if order != self._killed:
            self._killed = order
            self.say(order)

    def close(self) -> None:
        """Listen no more."""
        self._in.close()
        self._out.close()


def _is_running(slurm_id: str) -> bool:
    found = commands.look([slurm_id]).get(slurm_id)
    return found is not None and found.state == "RUNNING"


def _patiently(ask: Callable[[], _T]) -> _T:
    """Ask Slurm something that has to be answered; its own controller may be down for a while.

    Raises:
        RetryLater: it did not answer for minutes.
    """
    for _ in range(_PATIENCE - 1):
        try:
            return ask()
        except RetryLater as error:
            sys.stderr.write(f"{time.strftime('%F %T')} asked again in {_AGAIN_S:.0f} s: {error}\n")
            time.sleep(_AGAIN_S)
    return ask()


def _event(asked: Asked) -> Event:
    return Cancel() if asked.kind == "cancel" else Notice(asked.lead_s)


def _is_for_other_machines(life: Life, num_nodes: int) -> bool:
    """True if what ended the attempt is a reason not to go on with these machines."""
    own = [one for one in _outcomes(life, num_nodes) if not one.is_success and not one.is_stopped]
    return life.is_noticed or any(one.is_lost or one.is_preempted for one in own)


def _outcomes(life: Life, num_nodes: int) -> list[Outcome]:
    """How each node ended; lost is one that has said nothing."""
    return [life.outcomes.get(node, Outcome(Phase.RUN)) for node in range(num_nodes)]
