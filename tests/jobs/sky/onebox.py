"""SkyPilot itself, with a Slurm of one node on this machine as its cloud.

Stand-ins for what a machine without a cloud lacks; everything else is SkyPilot's own:

1. its runtime installs uv by a script from astral.sh: a `curl` on the PATH answers that one address with a
   script that copies the uv of PyPI;
2. it asks uv for Python 3.10: one of this machine is put on the PATH, if there is one;
3. it reaches Slurm by ssh: an sshd of our own on a port of the loopback interface, for root with a key;
4. its jobs controller waits until 8.8.8.8 or 1.1.1.1 answers: it is told to ask its own API server instead,
   by a line of its source in the tests' environment;
5. the Slurm node has this machine's own name, so that it resolves.

Its home is a folder of the test, so nobody's own configuration is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from holdfast.jobs.node import processes
from jobs.sky.installed import skypilot
from jobs.slurm.onebox import OneBox, one_box, own_name
from jobs.slurm.onebox import missing as missing_of_slurm
from servers import reserve_port

PACKAGES = "apt-get install --no-install-recommends -y slurm-wlm openssh-server rsync curl"
SERVER_PORT = 46580
"""SkyPilot's own choice for its API server."""
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def missing() -> str:
    """Return why SkyPilot cannot run here, or an empty string."""
    programs = ("sshd", "rsync", "curl", "ssh-keygen")
    found = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if found:
        return f"there is no {', '.join(found)} here: {PACKAGES}"
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", SERVER_PORT)) == 0:
            return f"something listens on port {SERVER_PORT} already: another API server of SkyPilot's?"
    return missing_of_slurm()


class SkyBox:
    """Running SkyPilot with its cloud.

    Args:
        cluster: its cloud.
        bin: folder of its programs.
    """

    def __init__(self, cluster: OneBox, bin: Path) -> None:
        self.cluster = cluster
        self.program = bin / "sky"
        self._bin = bin
        self._room = cluster.room
        self._shims = cluster.room / "bin"
        self._home = cluster.room / "home"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for `sky`."""
        return {
            "HOME": str(self._home),
            "SLURM_CONF": str(self.cluster.conf),
            "PATH": f"{self._shims}:{self._bin}:{os.environ['PATH']}",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "HOLDFAST_SKY": str(self.program),
        }

    def start(self) -> None:
        """Set up the substitutes, and let SkyPilot detect its cloud."""
        for folder in (self._shims, self._home / ".slurm", self._home / ".sky"):
            folder.mkdir(parents=True)
        self._put_programs()
        self._patch()
        self._start_sshd()
        config = "jobs:\n  controller:\n    consolidation_mode: true\n"
        (self._home / ".sky" / "config.yaml").write_text(config)
        said = self.sky("check", "slurm")
        assert "Slurm" in said, said

    def stop(self) -> None:
        """Stop SkyPilot's server and the sshd."""
        with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            self.sky("api", "stop")
        path = self._room / "sshd.pid"
        if path.exists():
            pid = int(path.read_text())
            sessions = processes.descendants(pid, processes.snapshot())  # that SkyPilot keeps open
            processes.kill(sessions)
            os.kill(pid, signal.SIGTERM)

    def sky(self, *words: str) -> str:
        """Return the output of a `sky` command."""
        environment = {**os.environ, **self.environment}
        environment.pop("PYTHONPATH", None)
        command = [str(self.program), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, input="", check=False, env=environment, timeout=600
        )
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def _put_programs(self) -> None:
        copies = f'mkdir -p "\\$UV_INSTALL_DIR"; cp {self._shims}/uv "\\$UV_INSTALL_DIR"/uv'
        curl = f"""#!/bin/sh
case "$*" in
  *astral.sh/uv/install.sh*) echo "{copies}" ;;
  *) exec {shutil.which("curl")} "$@" ;;
esac
"""
        uv = f'#!/bin/sh\nexport SSL_CERT_FILE={_CERTIFICATES}\nexec {self._bin}/uv "$@"\n'
        for name, text in (("curl", curl), ("uv", uv)):
            path = self._shims / name
            path.write_text(text)
            path.chmod(0o755)
        python = shutil.which("python3.10", path="/usr/local/bin:/usr/bin") or _own_python()
        if python is not None:
            (self._shims / "python3.10").symlink_to(python)

    def _patch(self) -> None:
        (source,) = self._bin.parent.glob("lib/python3*/site-packages/sky/backends/backend_utils.py")
        line = f"_TEST_IP_LIST = ['http://127.0.0.1:{SERVER_PORT}/api/health']"
        text = source.read_text()
        patched = re.sub(r"^_TEST_IP_LIST = .*$", line, text, flags=re.M)
        assert line in patched
        if patched != text:
            source.write_text(patched)

    def _start_sshd(self) -> None:
        room = self._room
        port = reserve_port()
        for name in ("ssh_key", "host_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(room / name)]
            subprocess.run(words, check=True)
        shutil.copy(room / "ssh_key.pub", room / "authorized_keys")
        environment = {
            "HOME": self._home,
            "SLURM_CONF": self.cluster.conf,
            "SSL_CERT_FILE": _CERTIFICATES,
            "REQUESTS_CA_BUNDLE": _CERTIFICATES,
            "PIP_CERT": _CERTIFICATES,
        }
        (room / "sshd.conf").write_text(
            f"""Port {port}
ListenAddress 127.0.0.1
HostKey {room}/host_key
AuthorizedKeysFile {room}/authorized_keys
PidFile {room}/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
AcceptEnv *
MaxSessions 100
MaxStartups 100
Subsystem sftp internal-sftp
SetEnv {" ".join(f"{name}={value}" for name, value in environment.items())}
"""
        )
        # A login shell sets another PATH.
        for name in (".bash_profile", ".bashrc"):
            (self._home / name).write_text(f"export PATH={self._shims}:$PATH\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        subprocess.run(["/usr/sbin/sshd", "-f", str(room / "sshd.conf")], check=True)
        key = room / "ssh_key"
        host = f"Host local\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {key}\n"
        (self._home / ".slurm" / "config").write_text(host)


def _own_python() -> str | None:
    """Return a Python 3.10 installed by pyenv or uv."""
    homes = ("~/.pyenv/versions/3.10*", "~/.local/share/uv/python/cpython-3.10*")
    places = [Path(home, "bin/python3.10").expanduser() for home in homes]
    found = [one for place in places for one in sorted(Path("/").glob(str(place).lstrip("/")))]
    return str(found[0]) if found else None


@contextlib.contextmanager
def sky_box() -> Iterator[SkyBox]:
    """Run SkyPilot and its cloud in a folder."""
    programs = skypilot()
    with one_box(own_name()) as cluster:
        box = SkyBox(cluster, programs)
        try:
            box.start()
            yield box
        finally:
            box.stop()
