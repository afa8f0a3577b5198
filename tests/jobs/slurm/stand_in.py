"""Stand-in for Slurm: its commands as scripts, with nodes that are all on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

_SBATCH = """\
[ -e {folder}/refuse ] && {{ echo "sbatch: error: invalid partition specified: none" >&2; exit 1; }}
[ -e {folder}/kill ] && kill -KILL $PPID
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_RESTART_COUNT=0 SLURM_NODEID=0
if [ ! -e {folder}/wait ]; then
  setsid bash {folder}/job "$2" </dev/null >{folder}/output 2>&1 &
fi
echo $! > {folder}/running
echo 7
"""
_JOB = """\
while [ -e {folder}/hold ]; do sleep 0.02; done
while :; do
  rm -f {folder}/requeue
  SLURM_JOB_NODELIST=$(paste -sd, {folder}/nodes) bash "$1"
  [ -e {folder}/requeue ] || break
  xargs -r kill -KILL < {folder}/tasks 2>/dev/null
  SLURM_RESTART_COUNT=$((SLURM_RESTART_COUNT + 1))
done
"""
_SRUN = """\
import os, pathlib, signal, subprocess, sys, threading

words = sys.argv[1:]
count = 1
while words[0].startswith("--"):
    option = words.pop(0)
    if option.startswith("--ntasks="):
        count = int(option.partition("=")[2])
names = pathlib.Path("{folder}/nodes").read_text().split()
tasks = []
for rank in range(count):
    place = {{"SLURM_NODEID": str(rank), "SLURMD_NODENAME": names[rank]}}
    tasks.append(subprocess.Popen(words, stdin=subprocess.PIPE, env={{**os.environ, **place}}))
pids = [os.getpid(), *(task.pid for task in tasks)]
pathlib.Path("{folder}/tasks").write_text(" ".join(map(str, pids)))

def forward():
    while data := os.read(0, 1 << 16):
        for task in tasks:
            try:
                os.write(task.stdin.fileno(), data)
            except OSError:
                pass
    for task in tasks:
        task.stdin.close()

threading.Thread(target=forward, daemon=True).start()
for _ in tasks:
    pid, status = os.wait()
    if status:  # --kill-on-bad-exit
        for task in tasks:
            if task.pid != pid:
                try:
                    os.kill(task.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
os._exit(0)
"""
_SCONTROL = """\
case "$*" in
  *hostnames*) cat {folder}/nodes ;;
  *"show node"*) while read -r name; do echo "NodeName=$name NodeAddr=127.0.0.1"; done < {folder}/nodes ;;
  *) [ "$1" = requeue ] && touch {folder}/requeue; echo "$@" >> {folder}/asked ;;
esac
"""
_SQUEUE = """\
[ -e {folder}/running ] && kill -0 "$(cat {folder}/running)" 2>/dev/null || exit 0
case "$*" in *%i*) echo "7|RUNNING|None" ;; *) echo RUNNING ;; esac
"""
_SCANCEL = """\
case "$*" in *KILL*) xargs -r kill -KILL < {folder}/tasks 2>/dev/null ;; esac
"""


class StandIn:
    """Stand-in for Slurm.

    Args:
        folder: folder for its programs, which a test puts first on the PATH.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        scripts = {"sbatch": _SBATCH, "job": _JOB, "scontrol": _SCONTROL, "squeue": _SQUEUE}
        for name, text in {**scripts, "sacct": "exit 1\n", "scancel": _SCANCEL}.items():
            self._write(name, "/bin/bash", text)
        self._write("srun", sys.executable, _SRUN)
        self.use_nodes("n1", "n2")

    def _write(self, name: str, program: str, text: str) -> None:
        (self.folder / name).write_text(f"#!{program}\n" + text.format(folder=self.folder))
        (self.folder / name).chmod(0o755)

    def will(self, what: str) -> None:
        """Have submissions refused (`refuse`), held (`hold`) or not run (`wait`), or the caller killed."""
        (self.folder / what).touch()

    def release(self) -> None:
        """Run a submission that was held."""
        (self.folder / "hold").unlink()

    def use_nodes(self, *names: str) -> None:
        """Give jobs these nodes, from their next start or attempt on."""
        (self.folder / "nodes").write_text("".join(f"{name}\n" for name in names))
