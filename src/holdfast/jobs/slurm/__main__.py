"""Entry of the processes of Slurm jobs: `python -m holdfast.jobs.slurm ROLE FOLDER`; not for people."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.jobs.node.folder import JobFolder, NodeFolder


def main() -> int:
    """Be what the first argument says, for the folder that the second names; its exit status."""
    role, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir("/")  # hold nobody's directory
    if role == "warden":
        from holdfast.jobs.node.warden import serve
        from holdfast.jobs.slurm.runner import die_with_runner

        die_with_runner()
        serve(NodeFolder(folder), replaces_controller=False)  # Slurm has its own way to a new one
        return 0
    if role == "sweep":
        from holdfast.jobs.slurm.runner import sweep

        sweep(JobFolder(folder), None)
        return 0
    if role == "runner":
        from holdfast.jobs.slurm.runner import run_node

        run_node(JobFolder(folder), int(sys.argv[3]), sys.argv[4].split(","))
        return 0
    from holdfast.jobs.slurm.controller import look_after

    return look_after(JobFolder(folder))


if __name__ == "__main__":
    sys.exit(main())
