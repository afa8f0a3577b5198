"""Ceph's object gateway as an S3 server for slow tests: three daemons that keep their objects in memory."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from holdfast.errors import RetryLater, Unsupported
from servers import BUCKET, Server, end, listens, reserve_port, send_request, start

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_KEY, _SECRET = "test", "testsecret"
_START_LIMIT_S = 600.0
_COMMAND_LIMIT_S = 600.0

# radosgw hangs without authentication, hence cephx. Without the gc settings, deleted objects fill up the
# memory.
_SETTINGS = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port},v1:127.0.0.1:{mon_old_port}]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 2
mon max pg per osd = 1000
run dir = {folder}/run
log file = {folder}/log/$name.log
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
crash dir = {folder}/log
mgr initial modules =
[mon]
mon data = {folder}/mon
mon cluster log file = {folder}/log/cluster.log
[client.admin]
keyring = {folder}/keyring
[osd]
keyring = {folder}/osd/keyring
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 8589934592
osd max object name len = 2048
osd max object namespace len = 256
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {folder}/rgw
keyring = {folder}/rgw/keyring
rgw dns name = localhost
rgw run sync thread = false
rgw gc obj min wait = 1
rgw gc processor period = 3
rgw gc processor max time = 3
rgw enable ops log = false
rgw enable usage log = false
"""


@contextmanager
def ceph_rgw() -> Iterator[Server]:
    """Run a monitor, an OSD that keeps its objects in memory, and a gateway that checks signatures.

    Blocks: until the gateway listens, which takes about 15 s; at the end, until all daemons have exited.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise Unsupported(
            f"Not installed: {', '.join(missing)}. On Debian: apt-get install --no-install-recommends "
            "radosgw ceph-mon ceph-osd ceph-common."
        )
    with tempfile.TemporaryDirectory(prefix="hf-rgw-") as folder, ExitStack() as stack:
        cluster = _Cluster(Path(folder), stack)
        cluster.start()
        _make_bucket(cluster.port)
        keys = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
        yield Server("s3", cluster.port, cluster.gateway_pid, keys, options={"region": "us-east-1"})


class _Cluster:
    """Daemons of a cluster and their folder. The daemons end when `stack` is closed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._config = str(folder / "ceph.conf")
        self.port = reserve_port()
        self.gateway_pid = 0

    def start(self) -> None:
        """Create the cluster and wait until the gateway listens."""
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        for name in ("mon", "osd", "rgw", "run", "log"):
            (self._folder / name).mkdir()
        mon_port = reserve_port()
        fields = {"mon_port": mon_port, "mon_old_port": reserve_port(), "port": self.port, "fsid": fsid}
        settings = _SETTINGS.format(folder=self._folder, **fields)
        Path(self._config).write_text(settings)
        self._start_monitor(fsid, fields)
        self._start_osd(osd)
        self._start_gateway()

    def _start_monitor(self, fsid: str, fields: Mapping[str, object]) -> None:
        keyring = str(self._folder / "keyring")
        allow = ["--cap", "mon", "allow *"]
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", *allow)
        allow += ["--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
        self._run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *allow)
        addresses = "[v2:127.0.0.1:{mon_port},v1:127.0.0.1:{mon_old_port}]".format(**fields)
        monmap = str(self._folder / "monmap")
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", addresses, monmap)
        options = ["--mkfs", "--monmap", monmap, "--keyring", keyring]
        self._run("ceph-mon", "-c", self._config, "-i", "a", *options)
        self._start("ceph-mon", "-f", "-c", self._config, "-i", "a")

    def _start_osd(self, osd: str) -> None:
        allow = ["mon", "allow profile osd", "osd", "allow *"]
        self._ceph("osd", "new", osd)
        self._ceph("auth", "get-or-create", "osd.0", *allow, "-o", str(self._folder / "osd" / "keyring"))
        # The OSD boots only with the uuid of `osd new`.
        self._run("ceph-osd", "-c", self._config, "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._start("ceph-osd", "-f", "-c", self._config, "-i", "0")
        self._ceph("osd", "crush", "add", "osd.0", "1.0", "host=h", "root=default")

    def _start_gateway(self) -> None:
        keyring = str(self._folder / "rgw" / "keyring")
        allow = ["mon", "allow rwx", "osd", "allow rwx"]
        self._ceph("auth", "get-or-create", "client.rgw", *allow, "-o", keyring)
        name = ["-c", self._config, "-n", "client.rgw"]
        gateway = self._start("radosgw", "-f", *name)
        self.gateway_pid = gateway.pid
        if not listens(gateway, self.port, _START_LIMIT_S):
            logs = "\n".join(path.read_text()[-500:] for path in (self._folder / "log").glob("*.log"))
            raise RetryLater(f"radosgw did not start: {logs}")
        keys = [f"--access-key={_KEY}", f"--secret-key={_SECRET}"]
        self._run("radosgw-admin", *name, "user", "create", "--uid=t", "--display-name=t", *keys)

    def _ceph(self, *words: str) -> None:
        self._run("ceph", "-c", self._config, "--connect-timeout", "30", *words)

    def _run(self, *argv: str) -> None:
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _COMMAND_LIMIT_S}
        done = subprocess.run(argv, cwd=self._folder, check=False, **options)
        if done.returncode:
            raise RetryLater(f"{' '.join(argv[:4])} failed: {done.stderr[-500:]}")

    def _start(self, *argv: str) -> subprocess.Popen[bytes]:
        output = self._stack.enter_context((self._folder / "log" / f"{argv[0]}.out").open("wb"))
        process = start(argv, None, output)
        self._stack.callback(end, process)
        return process


def _make_bucket(port: int) -> None:
    """Create the bucket. The client library only signs the request; it has no call for it."""
    import obstore
    from obstore.store import S3Store

    endpoint = f"http://127.0.0.1:{port}"
    options: dict[str, Any] = {"client_options": {"allow_http": True}, "region": "us-east-1"}
    store = S3Store(BUCKET, endpoint=endpoint, access_key_id=_KEY, secret_access_key=_SECRET, **options)
    send_request("PUT", obstore.sign(store, "PUT", "", expires_in=timedelta(minutes=5)))
