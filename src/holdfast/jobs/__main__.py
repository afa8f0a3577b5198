"""Internal entry point of the processes of jobs: `python -m holdfast.jobs ROLE FOLDER`.

Each imports only what its own role needs, and inherits its lock.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

from holdfast.system.backoff import doubled
from holdfast.system.linux import locks
from holdfast.system.log import get_logger, write_times

_log = get_logger("jobs")

_FIRST_S = 1.0
_LONGEST_S = 60.0  # longest pause between two controllers, and the time after which one counts as healthy


def fork_guarded() -> None:
    """Return in a child process that this one, its guardian, starts again whenever a signal ends it."""
    # Both have the inherited lock, so a child that is killed leaves no moment for another controller.
    num_kills = 0
    while True:
        begin_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return
        signal.signal(signal.SIGTERM, lambda *_, pid=pid: os.kill(pid, signal.SIGTERM))  # it is passed on
        status = os.waitpid(pid, 0)[1]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Without the lock, the child had released it and another controller may be running.
        if not os.WIFSIGNALED(status) or not locks.retake_inherited():
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        num_kills = 1 if time.monotonic() - begin_s > _LONGEST_S else num_kills + 1
        _log.error("the controller was killed by signal %d and is started again", os.WTERMSIG(status))
        time.sleep(doubled(num_kills, _FIRST_S, _LONGEST_S))


_MODULES = {
    "agent": "holdfast.jobs.node.agent",
    "mounter": "holdfast.jobs.node.mounts.mounter",
    "notifier": "holdfast.jobs.notifications",
    "warden": "holdfast.jobs.node.containers.node_container",
}
"""Modules of all roles but the controller. Their `serve` takes the folder."""


def main(role: str, folder: Path) -> None:
    """Run a process of a job."""
    os.chdir("/")  # do not keep any directory busy
    locks.keep_inherited()
    if role in ("controller", "notifier"):
        write_times()
    if role == "controller":
        fork_guarded()  # before the imports that the guardian does not need
        from holdfast.jobs.folder import STATE
        from holdfast.jobs.local.controller import resume_if_due, supervise

        state, number = folder.parents[1], int(folder.name)
        os.environ[STATE] = str(state)  # for the processes that it starts, whose state is that of the job
        if supervise(state, number):
            # A request that found this controller leaving did not start another one.
            locks.release_inherited()
            resume_if_due(state, number)
    else:
        import_module(_MODULES[role]).serve(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
