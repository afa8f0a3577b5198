"""Internal entry point of local controllers: `python -m holdfast.jobs.local ROLE FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.system.linux import locks


def main() -> None:
    """Run the controller of a job, which inherits the job's lock."""
    folder = Path(sys.argv[2])
    os.chdir("/")  # do not keep any directory busy
    locks.keep_inherited()
    from holdfast.jobs.local.guardian import fork_guarded
    from holdfast.system.log import write_times

    write_times()
    fork_guarded()  # before the imports that the guardian does not need
    from holdfast.jobs.local.controller import resume_if_due, supervise

    state, number = folder.parents[1], int(folder.name)
    if supervise(state, number):
        # A request that found this controller leaving did not start another one.
        locks.release_inherited()
        resume_if_due(state, number)


if __name__ == "__main__":
    main()
