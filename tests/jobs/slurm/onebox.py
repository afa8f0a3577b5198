"""A Slurm of two nodes on this machine, from Debian's packages: a real scheduler, whose nodes share a kernel.

No cgroups, no accounting, no PAM. Partition `spot` is preempted by partition `prio`, by requeueing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from servers import reserve_port

PACKAGES = "apt-get install --no-install-recommends -y slurm-wlm"
GRACE_S = 15
"""Between Slurm's first word and its SIGTERM when a job is preempted."""
KILL_WAIT_S = 10
_LOOKS = 5
_LIMIT_S = 600.0

_CONF = """\
ClusterName=onebox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port0}
AuthType=auth/munge
# cred_expire sets the requeue delay: with the default of 120 s a requeued job waits that long
AuthInfo=socket={room}/munge/sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={room}/ctld
SlurmdSpoolDir={room}/d.%n
SlurmctldPidFile={room}/slurmctld.pid
SlurmdPidFile={room}/slurmd.%n.pid
SlurmctldLogFile={room}/log/slurmctld.log
SlurmdLogFile={room}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}PartitionName=spot Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=prio Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 "
    "State=UNKNOWN\n"
)


def missing() -> str:
    """Return why Slurm cannot run here, or an empty string."""
    if os.geteuid() != 0:
        return "a Slurm of two nodes on one machine needs root, since its nodes start jobs as their users"
    programs = ("slurmctld", "slurmd", "munged", "sbatch")
    found = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"there is no {', '.join(found)} here: {PACKAGES}" if found else ""


class OneBox:
    """Running cluster.

    Args:
        room: its folder; short, and open to the user `munge`.
        nodes: their names.
    """

    def __init__(self, room: Path, nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        self.room = room
        self.conf = room / "slurm.conf"
        self._nodes = nodes
        self._daemons = [*(f"slurmd.{node}" for node in nodes), "slurmctld", "munge/munged"]

    def start(self) -> None:
        """Start the cluster, and wait until both nodes are idle."""
        for name in ("ctld", "log", "munge", *(f"d.{node}" for node in self._nodes)):
            (self.room / name).mkdir(mode=0o755)
        key = self.room / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        subprocess.run(["chown", "-R", "munge", str(self.room / "munge")], check=True)
        host = own_name()
        port, *ports = (reserve_port() for _ in range(1 + len(self._nodes)))
        facts = {"host": host, "room": self.room, "grace": GRACE_S, "kill_wait": KILL_WAIT_S}
        nodes = [
            _NODE.format(name=name, host=host, port=port)
            for name, port in zip(self._nodes, ports, strict=True)
        ]
        self.conf.write_text(_CONF.format(port0=port, nodes="".join(nodes), **facts))
        at = str(self.room / "munge")
        options = [f"--key-file={at}/key", f"--socket={at}/sock", f"--pid-file={at}/munged.pid"]
        options += [f"--seed-file={at}/seed", f"--log-file={at}/log"]
        self._run(["runuser", "-u", "munge", "--", "munged", "--force", *options])
        self._wait_for(lambda: (self.room / "munge" / "sock").exists(), "munged")
        for words in (["slurmctld"], *(["slurmd", "-N", node] for node in self._nodes)):
            self._run(words)
        self._wait_for(self.is_idle, "idle nodes")

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """Stop slurmctld, and start it again at the end."""
        process = psutil.Process(int((self.room / "slurmctld.pid").read_text()))
        process.terminate()
        process.wait(_LIMIT_S)
        try:
            yield
        finally:
            self._run(["slurmctld"])

    def stop(self) -> None:
        """Cancel all jobs, and stop the daemons."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run(["scancel", "--user=root", "--signal=KILL", "--full"])
            self._run(["scancel", "--user=root"])
        for name in self._daemons:
            path = self.room / f"{name}.pid"
            if path.exists():
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(int(path.read_text()), signal.SIGTERM)
        self._end_left_over()

    def _end_left_over(self) -> None:
        """Kill what is still there of this cluster: steps that nobody watches once slurmd has ended.

        A daemon on its way out may have begun another one meanwhile, so it is looked for again.
        """
        for _ in range(_LOOKS):
            left = self._left_over()
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=_LIMIT_S)

    def _left_over(self) -> list[psutil.Process]:
        room, found = str(self.room), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                named = any(room in word for word in [*process.cmdline(), *process.environ().values()])
                if named and process.pid != os.getpid():
                    found.append(process)
        return found

    def is_idle(self) -> bool:
        """Return True if all nodes are up and idle."""
        words = ["sinfo", "--noheader", "--partition=spot", "--states=idle", "--format=%D"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=self._environment())
        return done.stdout.strip() == str(len(self._nodes))

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def _run(self, words: list[str]) -> None:
        subprocess.run(words, check=True, env=self._environment(), stdin=subprocess.DEVNULL, timeout=_LIMIT_S)

    def _wait_for(self, what: object, name: str) -> None:
        assert callable(what)
        deadline = time.monotonic() + _LIMIT_S
        while not what():
            logs = "\n".join(path.read_text()[-2000:] for path in (self.room / "log").glob("*"))
            assert time.monotonic() < deadline, f"waited in vain for {name}:\n{logs}"
            time.sleep(0.1)


def own_name() -> str:
    """Return the name of this machine in Slurm."""
    return socket.gethostname().partition(".")[0]


@contextlib.contextmanager
def one_box(*nodes: str) -> Iterator[OneBox]:
    """Run a cluster in a folder, of two nodes by default."""
    # Not below pytest's folder: a Unix socket's path is short, and `munge` may not look in there.
    room = Path(tempfile.mkdtemp(prefix="hf-slurm-", dir="/tmp"))
    room.chmod(0o755)
    cluster = OneBox(room, nodes or ("n1", "n2"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(room, ignore_errors=True)
