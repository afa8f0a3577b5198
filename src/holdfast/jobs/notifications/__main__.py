"""Internal entry point of notifiers: `python -m holdfast.jobs.notifications notifier FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.system.linux import locks


def main() -> None:
    """Run the notifier of a job, which inherits the notifier's lock."""
    from holdfast.jobs.folder import JobFolder
    from holdfast.jobs.notifications.notifier import outstanding, serve
    from holdfast.jobs.notifications.outbox import read_plan
    from holdfast.system.log import write_times

    write_times()
    folder = JobFolder(Path(sys.argv[2]))
    os.chdir("/")  # do not keep any directory busy
    lock = locks.keep_inherited()
    try:
        if (plan := read_plan(folder)) is not None:
            os.environ.update(plan.environment)  # such as the proxies of the user
        while True:
            serve(folder)
            os.close(lock)
            # A status that was recorded just before did not start another notifier.
            again = locks.acquire(folder.notifier_lock) if outstanding(folder) else None
            if again is None:
                return
            lock = again
    except FileNotFoundError:
        return  # the job was removed


if __name__ == "__main__":
    main()
