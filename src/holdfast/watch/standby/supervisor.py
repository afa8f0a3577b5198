"""Supervisor of a rank: forks the process that trains, waits for it, and forks again when it dies."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from msgspec.structs import replace

from holdfast.errors import PREEMPTED_STATUS, InvalidInput, WatchWarning
from holdfast.system.callsite import warn
from holdfast.system.environment import TRIAL
from holdfast.system.linux.processes import die_with_parent, has_threads
from holdfast.watch.standby.in_place import add_watch, run_rounds
from holdfast.watch.standby.rounds import COMPLETE, Launch, RankLink, Rounds, serve_store
from holdfast.watch.standby.start.sitecustomize import FORWARDED, exit_as

_T = TypeVar("_T")
_SIGNALS = (*(signal.Signals[name] for name in FORWARDED), signal.SIGCHLD)
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def supervise(
    function: Callable[..., _T],
    *arguments: Any,
    restart: Literal["rank", "all"] = "rank",
    max_restarts: int = 10,
) -> _T:
    """Return `function(*arguments)` from a process that is started again when it dies.

    This process forks, and the new process calls the function. When the process of a rank is killed or raises
    an error, only that rank is forked again: its modules are imported already. The others end their process
    group and call the function again, in the same process. The function makes the process group, the model
    and the Checkpointer, which restores from memory, and the training continues from the newest save.

    What the launcher does at a failure, such as torchrun with `--max-restarts`, comes after this: when a host
    is lost, after `max_restarts`, when an error comes before the first step of a start, and when this process
    cannot be forked, since it has threads, a process group or a GPU in use. A line gives the reason then.

    Args:
        function: what trains, from `init_process_group` to the end.
        arguments: positional arguments of the function.
        restart: "rank"; or "all" for functions or libraries that cannot run twice in one process: all ranks
            are forked again.
        max_restarts: restarts of all ranks together.

    Raises:
        InvalidInput: an argument is not valid, or the environment lacks MASTER_ADDR.

    Ranks: every rank calls it, in a process of its own, before `init_process_group`.
    Blocks: as long as the function. Only the process that trains returns, and this one exits as it does.
    """
    if restart not in ("rank", "all") or not isinstance(max_restarts, int) or max_restarts < 0:
        raise InvalidInput(
            f"supervise(restart={restart!r}, max_restarts={max_restarts!r}): expected restart='rank' or "
            "'all', and max_restarts from 0. Nothing was started."
        )
    if TRIAL in os.environ:  # such as `holdfast check`, which kills the training and starts it itself
        return function(*arguments)
    launch, link = Launch.read(), RankLink()
    add_watch()
    if reason := _reason_against_fork():
        warn(f"supervise() calls the function once, and does not start it again: {reason}.", WatchWarning)
        return function(*arguments)
    launch = _join(launch)
    number = _Supervisor(launch, link, max_restarts).run()
    return run_rounds(function, arguments, launch, link, number, stays=restart == "rank", most=max_restarts)


def _reason_against_fork() -> str:
    """Return why this process must not be forked; empty if it may be."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "it was called after init_process_group(), which belongs into the function"
    if torch.cuda.is_initialized():
        return "a GPU is in use already; use it in the function"
    if has_threads():
        return "this process has threads already; start them in the function"
    return ""


def _join(launch: Launch) -> Launch:
    """Return the launch with the name of its rounds, which differ from those of earlier starts."""
    if launch.world_size == 1:
        return launch
    if not launch.has_store and launch.rank == 0 and not os.fork():
        die_with_parent()
        serve_store(launch)
    return replace(launch, name=f"{launch.name}.{Rounds(launch).count_start()}")


class _Supervisor:
    """Process that waits for the one that trains."""

    def __init__(self, launch: Launch, link: RankLink, most: int) -> None:
        self._launch, self._link, self._most = launch, link, most
        self._rounds = Rounds(launch)
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._is_ending = False  # it was asked to end
        self._imports = True  # the names of the modules have not been received yet

    def run(self) -> int:
        """Fork until the rank is complete or not started again. Return the round in a forked process."""
        number = 0
        gc.freeze()  # a collection at the end of a round visits only what the function has made
        while True:
            sys.stdout.flush()
            sys.stderr.flush()
            parent, pid = os.getpid(), os.fork()
            if not pid:
                die_with_parent()
                if os.getppid() != parent:
                    os._exit(1)
                os.setsid()  # signals of the terminal arrive once: forwarded
                self._link.begin(number)
                return number
            status = self._wait(pid)
            following = self._next(status)
            if following is None:
                exit_as(status)
            number = following

    def _wait(self, pid: int) -> int:
        """Forward signals to a process, and return its exit status."""

        def forward(number: int, _: object) -> None:
            self._is_ending |= number in _ENDING
            os.kill(pid, number)

        def end_round(*_: object) -> None:  # at once, though this process may be importing
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if found is not None:
                status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                with contextlib.suppress(RuntimeError):  # `_next` meets the same error
                    self._end(status)

        for number, handler in self._handlers.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, forward if number != signal.SIGCHLD else end_round)
        self._import_until_end(pid)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _import_until_end(self, pid: int) -> None:
        """Wait for the end of a process, and import meanwhile what it has imported: the next one need not."""
        pidfd, poll, names = os.pidfd_open(pid), select.poll(), bytearray()
        poll.register(pidfd, select.POLLIN)
        if self._imports:
            poll.register(self._link.modules, select.POLLIN)
        while pidfd not in {fd for fd, _ in poll.poll()}:
            block = self._link.modules.recv(1 << 16)
            names += block
            if not block:
                self._imports = False
                poll.unregister(self._link.modules)
                for name in names.decode(errors="replace").split():
                    with contextlib.suppress(Exception, SystemExit):  # the training sees the error itself
                        importlib.import_module(name)
        os.close(pidfd)

    def _end(self, status: int) -> str:
        """Return how the process of the rank has died, after ending the round; empty if it has not died."""
        is_early = status > 0 and not self._link.has_stepped  # the error would come again
        if status in (0, PREEMPTED_STATUS) or is_early or self._is_ending:
            return ""
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._rounds.end(self._link.round, f"rank {self._launch.rank} {how}")

    def _next(self, status: int) -> int | None:
        """Return the round of the next start of the rank; None if it is not started again."""
        rank, number = self._launch.rank, self._link.round
        try:
            found = self._end(status)
            if not status:
                found = self._rounds.complete(number)
            if found in ("", COMPLETE):
                return None
            following = self._rounds.next_after(number + 1)
        except RuntimeError as error:  # of the store, which may end as soon as all ranks are complete
            if status:
                _write(f"rank {rank} has died, and is not started again: {error}")
            return None
        if following > self._most:
            _write(f"{found}. Rank {rank} is not started again: max_restarts={self._most} is used up")
            return None
        _write(f"{found}. Rank {rank} is started again: restart {following} of {self._most}")
        return following


def _write(line: str) -> None:
    sys.stderr.write(f"holdfast: {line}\n")
    sys.stderr.flush()
