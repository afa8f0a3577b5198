"""Mounts a prefix of a bucket as a file system by rclone; keys are in its environment, never in arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.errors import RetryLater, Unsupported
from holdfast.jobs.node.mounts import fuse
from holdfast.jobs.node.mounts.supply import Supply
from holdfast.store.address import AZURE, GCS, S3, Address, parse_address

_REMOTE = "HOLDFAST"
_PREFIX = f"RCLONE_CONFIG_{_REMOTE}_"
_START_LIMIT_S = 60.0
_END_LIMIT_S = 10.0
_POLL_S = 0.05
_TAIL_BYTES = 2000
_ENDPOINTS = {
    S3: ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    GCS: ("GOOGLE_BASE_URL",),
    AZURE: ("AZURE_STORAGE_ENDPOINT",),
}
# The kernel ends rclone, which then unmounts, with the process that started it, also after SIGKILL.
_END_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class BucketMount:
    """A bucket that is mounted as long as this process lives, or until it is closed.

    Nothing is kept on this machine: a file goes to the bucket while it is written, and closing it waits
    until it is there. So files must be written from their beginning to their end.

    Args:
        supply: what is mounted where.
        log: file for rclone's own words.
    """

    def __init__(self, supply: Supply, log: Path) -> None:
        self._supply, self._log = supply, log
        self._path = Path(supply.path)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def lives(self) -> bool:
        """Whether it is there, and rclone serves it."""
        return self._process is not None and self._process.poll() is None and fuse.is_mounted(self._path)

    def open(self, is_wanted: Callable[[], bool]) -> None:
        """Mount; what a dead rclone has left there is taken away first.

        Raises:
            RetryLater: it did not come in time, or rclone ended; with its last words.
            Unsupported: there is no rclone.

        Blocks: until the kernel has it in its list.
        """
        self.close()
        fuse.unmount_below(self._path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._path.chmod(0o500)  # what is written while nothing is mounted would be lost in the folder below
        address = parse_address(self._supply.place)
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    self._words(address),
                    env=rclone_environment(address, os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise Unsupported("The program rclone is not there any more; install it again.") from error
        self._wait(is_wanted)
        self._look(is_wanted)

    def close(self) -> None:
        """Unmount, and see rclone gone.

        Blocks: until it has sent what is still being written, at most 10 s.
        """
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        fuse.unmount_below(self._path)

    def _words(self, address: Address) -> list[str]:
        words = ["rclone", "mount", f"{_REMOTE}:{address.bucket}/{address.prefix}", str(self._path)]
        options = ["--config", os.devnull, "--vfs-cache-mode", "off", "--dir-cache-time", "10s"]
        read_only = ["--read-only"] if self._supply.is_read_only else []
        ends = [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid())]
        return [*ends, *words, *options, *read_only]

    def _look(self, is_wanted: Callable[[], bool]) -> None:
        """See that what is mounted can be read: rclone asks the bucket only when it is asked itself."""
        found: list[str] = []

        def read() -> None:
            try:
                next(self._path.iterdir(), None)
                found.append("")
            except OSError as error:
                found.append(error.strerror or str(error))

        # In a thread: while rclone tries again and again, whoever reads cannot be interrupted.
        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        give_up_s = time.monotonic() + _START_LIMIT_S
        while reading.is_alive() and time.monotonic() < give_up_s and is_wanted():
            reading.join(_POLL_S)
        why = found[0] if found else "no answer"
        if why:
            self.close()
            raise RetryLater(
                f"{self._supply.place} was mounted at {self._path} and cannot be read: {why}. rclone said: "
                f"{self._said()}"
            )

    def _said(self) -> str:
        return self._log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()

    def _wait(self, is_wanted: Callable[[], bool]) -> None:
        assert self._process is not None
        give_up_s = time.monotonic() + _START_LIMIT_S
        while not fuse.is_mounted(self._path):
            status = self._process.poll()
            if status is not None or time.monotonic() > give_up_s or not is_wanted():
                self.close()
                how = "is not ready" if status is None else f"ended with status {status}"
                raise RetryLater(
                    f"{self._supply.place} could not be mounted at {self._path}: rclone {how}. It said: "
                    f"{self._said()}"
                )
            time.sleep(_POLL_S)


def rclone_environment(address: Address, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an rclone that is to reach a store.

    Args:
        address: of what is mounted.
        environment: where the keys are, as for `open_store`.
    """
    found = {**environment, **settings(address, environment)}
    if bundle := found.pop("AWS_CA_BUNDLE", None):
        # rclone fails of this variable, and has another one for the same.
        found.setdefault("RCLONE_CA_CERT", bundle)
    return found


def settings(address: Address, environment: Mapping[str, str]) -> dict[str, str]:
    """What rclone has to know of a store, as variables; see `rclone_environment`."""
    endpoint = address.option("endpoint_url")
    endpoint = endpoint or next(
        (environment[name] for name in _ENDPOINTS[address.protocol] if environment.get(name)), None
    )
    own = {S3: _s3, GCS: _gcs, AZURE: _azure}[address.protocol](address, environment, endpoint)
    return {f"{_PREFIX}{name}": value for name, value in own.items() if value}


def _s3(address: Address, environment: Mapping[str, str], endpoint: str | None) -> dict[str, str]:
    known = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return {
        "TYPE": "s3",
        "PROVIDER": "Other" if endpoint else "AWS",
        "ENV_AUTH": "false" if address.is_on("anonymous") else "true",
        "ENDPOINT": endpoint or "",
        "REGION": address.option("region") or known or "us-east-1",
        "PROFILE": address.option("profile") or "",
        "FORCE_PATH_STYLE": "false" if address.is_on("virtual_hosted") or not endpoint else "true",
        "SERVER_SIDE_ENCRYPTION": address.option("sse") or "",
        "SSE_KMS_KEY_ID": address.option("sse_kms_key_id") or "",
        "REQUESTER_PAYS": "true" if address.is_on("requester_pays") else "",
        "NO_CHECK_BUCKET": "true",  # it is there, and whoever may write to it may not always make it
    }


def _gcs(address: Address, environment: Mapping[str, str], endpoint: str | None) -> dict[str, str]:
    file = environment.get("GOOGLE_SERVICE_ACCOUNT") or environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    return {
        "TYPE": "google cloud storage",
        "SERVICE_ACCOUNT_FILE": file or "",
        "ENV_AUTH": "" if file else "true",
        "ANONYMOUS": "true" if address.is_on("anonymous") else "",
        "ENDPOINT": endpoint or "",
        "BUCKET_POLICY_ONLY": "true",
    }


def _azure(address: Address, environment: Mapping[str, str], endpoint: str | None) -> dict[str, str]:
    account = address.option("account") or environment.get("AZURE_STORAGE_ACCOUNT_NAME")
    key = environment.get("AZURE_STORAGE_ACCOUNT_KEY")
    return {
        "TYPE": "azureblob",
        "ACCOUNT": account or "",
        "KEY": key or "",
        "ENV_AUTH": "" if key else "true",
        "ENDPOINT": endpoint or "",
    }
