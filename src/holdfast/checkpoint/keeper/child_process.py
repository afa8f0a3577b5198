"""Process of a keeper, as the trainer that started it sees it: its socket, its stderr and its exit."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable

from holdfast import __version__
from holdfast.checkpoint.keeper import packets
from holdfast.checkpoint.keeper.config import IGNORED_SIGNALS, OTHER_VERSION_STATUS, KeeperConfig
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, Lockfile
from holdfast.checkpoint.keeper.messages import Configure, Message, Ping, Pong
from holdfast.checkpoint.keeper.packets import Outbox
from holdfast.system.entry import command
from holdfast.system.linux.processes import read_stat, start_time
from holdfast.system.units import format_duration

_REAP_S = 5.0
"""Time that a killed keeper may take to exit."""
_CONDITIONS = {"D": "waits for the kernel, as for a disk or a server that does not answer", "T": "is stopped"}
_TAIL_BYTES = 4000
"""Bytes of a dead keeper's stderr that its error shows."""
_CHECK_S = 1.0
"""Pause between two checks whether the keeper responds."""
_MAX_SILENT_CHECKS = 20
"""Checks in a row without a response, after which a keeper is replaced."""
_MAX_START_CHECKS = 300
"""The same before its first response: on a busy machine or a slow disk, Python itself may start slowly.

A process that stands still does not start, so checks at which it does are limited as later ones are.
"""


class ChildProcess:
    """Keeper process started by this trainer, with the socket to it, and the outbox of that."""

    def __init__(
        self, process: subprocess.Popen[bytes], end: socket.socket, *, stderr_fd: int, lockfile: Lockfile
    ) -> None:
        self.end = end
        self.outbox = Outbox(end)
        self._process = process
        self._stderr_fd = stderr_fd
        self._lockfile = lockfile

    @classmethod
    def start(
        cls, config: KeeperConfig, *, pulse_fd: int = -1, listener: socket.socket | None = None
    ) -> ChildProcess:
        """Start a keeper, and send it its configuration, with the pulse of this process, if it has one.

        Args:
            listener: socket on which the peers of the keeper call, if it has peers.
        """
        trainer = os.getpid(), start_time(os.getpid()) or 0
        # Busy from the start: it owns what is sent to it while it starts.
        info = KeeperInfo(config.attempt, config.rank, *trainer, busy=True, pulse_fd=pulse_fd, run=config.run)
        lockfile = Lockfile.create(config.home, info)
        ours, theirs = packets.make_pair()
        stderr_fd = os.memfd_create("holdfast-keeper-stderr")  # leaves no file behind
        # A process inherits the mask: blocked signals cannot end the keeper before it ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        arguments = __version__, str(theirs.fileno()), str(lockfile.fd), str(lockfile.path)
        try:
            process = subprocess.Popen(
                command("holdfast.checkpoint.keeper", *arguments),
                cwd="/",  # keeps no other directory in use
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr_fd,
                pass_fds=(theirs.fileno(), lockfile.fd),
                start_new_session=True,  # Ctrl-C and SIGTERM to the trainer's process group do not reach it
            )
        except OSError:
            lockfile.path.unlink(missing_ok=True)
            os.close(stderr_fd)
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
            lockfile.close()
        child = cls(process, ours, stderr_fd=stderr_fd, lockfile=lockfile)
        fds = (pulse_fd,) if pulse_fd >= 0 else ()
        child.outbox.send(Configure(config), fds if listener is None else (*fds, listener.fileno()))
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_failed(self) -> bool:
        """True if a signal or an error has ended the process, once it was reaped."""
        return self._process.returncode not in (0, OTHER_VERSION_STATUS)

    @property
    def is_other_version(self) -> bool:
        """True if another version of Holdfast has been installed since this process began."""
        return self._process.returncode == OTHER_VERSION_STATUS

    @property
    def is_done(self) -> bool:
        """True if the process has stored everything, and at most offers its memory."""
        return self._lockfile.is_done

    @property
    def condition(self) -> str:
        """Why the process makes no progress, as far as its state shows it; else empty."""
        stat = read_stat(self.pid)
        return "" if stat is None else _CONDITIONS.get(stat.state, "")

    def listen(self, receive: Callable[[Message], None], must_answer: Callable[[], bool]) -> str:
        """Pass on messages until the process dies or is silent for too long; return a text about its silence.

        Args:
            must_answer: returns True while the keeper has work. A queue of messages is work too.
        """
        poll, num_checks, num_still, has_responded = select.poll(), 0, 0, False
        poll.register(self.end, select.POLLIN)
        while num_checks < _MAX_START_CHECKS and num_still < _MAX_SILENT_CHECKS:
            # Counts checks instead of reading a clock, as this process may have been stopped itself.
            if poll.poll(_CHECK_S * 1000):
                message, _ = packets.receive(self.end)
                if message is None:
                    return ""
                num_checks, num_still, has_responded = 0, 0, True
                if not isinstance(message, Pong):
                    receive(message)
            elif must_answer() or self.outbox:
                num_checks += 1
                stat = None if has_responded else read_stat(self.pid)
                is_starting = stat is not None and stat.state in "RD"  # or waits for a processor or a disk
                num_still = 0 if is_starting else num_still + 1
                if not self.outbox:
                    self.outbox.send(Ping())
        limit = format_duration(num_checks * _CHECK_S)
        return f"did not answer for {limit}, as if it were stopped or frozen, and was killed."

    def reap(self, silence: str) -> str:
        """Wait for the exit of the process, release everything, and return how it died.

        Args:
            silence: text about a process that does not answer, which is killed; empty for one that has died.

        Blocks: until it has exited, at most 5 s.
        """
        if silence:
            self._process.kill()  # even if it is stopped or frozen: it executes no further instruction
        self.outbox.close()
        try:
            status = self._process.wait(_REAP_S)
            cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:  # frozen by its control group: it dies before it runs again
            self._process.kill()
            self._lockfile.path.unlink(missing_ok=True)  # so that no attempt waits for it
            cause = "killed, but not gone yet"
        start = max(0, os.fstat(self._stderr_fd).st_size - _TAIL_BYTES)
        tail = os.pread(self._stderr_fd, _TAIL_BYTES, start).decode(errors="replace").strip()
        os.close(self._stderr_fd)
        self.end.close()
        died = f"died ({cause}). Its last output: {tail}" if tail else f"died ({cause})."
        return silence or died
