"""Internal entry point of Slurm jobs' processes: `python -m holdfast.jobs.slurm ROLE FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.jobs.slurm.job_files import JobFiles


def main() -> int:
    """Run the process with the role of the first argument, and return its exit status."""
    role, folder = sys.argv[1], JobFiles(Path(sys.argv[2]))
    os.chdir("/")  # do not keep any directory busy
    if role == "controller":
        from holdfast.jobs.slurm.controller import supervise
        from holdfast.system.log import write_times

        write_times()
        return supervise(folder)
    if role == "sweep":
        from holdfast.jobs.node.processes import end_other_attempts

        end_other_attempts(folder.read_job().task_id, None)
    else:
        from holdfast.jobs.slurm.runner import run_node

        run_node(folder, int(sys.argv[3]), sys.argv[4].split(","), float(sys.argv[5]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
