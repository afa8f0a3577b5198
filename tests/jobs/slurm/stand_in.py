"""Stand-in for Slurm with one node: its commands as shell scripts, which run a submitted script at once."""

from __future__ import annotations

from pathlib import Path

_SBATCH = """\
[ -e {folder}/refuse ] && {{ echo "sbatch: error: invalid partition specified: none" >&2; exit 1; }}
[ -e {folder}/kill ] && kill -KILL $PPID
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_RESTART_COUNT=0 SLURM_NODEID=0
if [ ! -e {folder}/wait ]; then
  setsid bash "$2" </dev/null >{folder}/output 2>&1 &
fi
echo $! > {folder}/running
echo 7
"""
_SRUN = """\
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
_SCONTROL = """\
case "$*" in
  *hostnames*) echo n1 ;;
  *"show node"*) echo "NodeName=n1 NodeAddr=127.0.0.1" ;;
  *) echo "$@" >> {folder}/asked ;;
esac
"""
_SQUEUE = """\
[ -e {folder}/running ] && kill -0 "$(cat {folder}/running)" 2>/dev/null || exit 0
case "$*" in *%i*) echo "7|RUNNING|None" ;; *) echo RUNNING ;; esac
"""


class StandIn:
    """Stand-in for Slurm.

    Args:
        folder: folder for its programs, which a test puts first on the PATH.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        scripts = {"sbatch": _SBATCH, "srun": _SRUN, "scontrol": _SCONTROL, "squeue": _SQUEUE}
        for name, text in {**scripts, "sacct": "exit 1\n", "scancel": ""}.items():
            (folder / name).write_text("#!/bin/bash\n" + text.format(folder=folder))
            (folder / name).chmod(0o755)

    def will(self, what: str) -> None:
        """Have submissions refused (`refuse`) or not run (`wait`), or their caller killed (`kill`)."""
        (self.folder / what).touch()
