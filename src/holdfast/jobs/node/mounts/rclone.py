"""Mount of a bucket's prefix by rclone, with credentials in its environment only."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.checkpoint.store.address import AZURE, GCS, S3, Address, parse_address
from holdfast.errors import RetryLater, Unsupported
from holdfast.jobs.node.mounts import fuse
from holdfast.jobs.node.mounts.mount_records import MountSpec
from holdfast.system.linux.processes import dying_with_parent

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


class BucketMount:
    """Mounted bucket. The mount lasts until it is closed or this process dies.

    Nothing is cached on this machine: a file is uploaded while it is written, and closing it waits for the
    upload. So files must be written sequentially.
    """

    def __init__(self, spec: MountSpec, log: Path) -> None:
        self._spec, self._log = spec, log
        self._path = Path(spec.path)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_open(self) -> bool:
        """True if the bucket is mounted and rclone is running."""
        return self._process is not None and self._process.poll() is None and fuse.is_mounted(self._path)

    def open(self, is_wanted: Callable[[], bool]) -> None:
        """Mount the bucket, after unmounting what a dead rclone has left."""
        if why := fuse.why_not_mountable(self._spec.place):
            raise Unsupported(f"{self._spec.key}: {why}")
        self.close()
        fuse.unmount_below(self._path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._path.chmod(0o500)  # files written here without a mount would be hidden by it
        address = parse_address(self._spec.place)
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
                raise Unsupported("rclone is no longer installed. Install it again.") from error
        if not self._wait_until(lambda: fuse.is_mounted(self._path), is_wanted):
            status = self._process.poll()
            how = "is not ready" if status is None else f"ended with status {status}"
            raise self._failure(f"Cannot mount {self._spec.place} at {self._path}: rclone {how}.")
        if why := self._why_not_readable(is_wanted):
            raise self._failure(f"{self._spec.place} was mounted at {self._path} but cannot be read: {why}.")

    def close(self) -> None:
        """Unmount, and end rclone.

        Blocks: until rclone has sent what is being written, at most 10 s.
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
        read_only = ["--read-only"] if self._spec.is_read_only else []
        # It unmounts when it receives the signal.
        return dying_with_parent([*words, *options, *read_only], signal.SIGTERM)

    def _wait_until(self, is_ready: Callable[[], bool], is_wanted: Callable[[], bool]) -> bool:
        """Return True once the mount is ready; False if rclone or the attempt ends, or after the limit."""
        assert self._process is not None
        give_up_s = time.monotonic() + _START_LIMIT_S
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > give_up_s or not is_wanted():
                return False
            time.sleep(_POLL_S)
        return True

    def _why_not_readable(self, is_wanted: Callable[[], bool]) -> str:
        """Return why the mount cannot be read. rclone contacts the bucket only then."""
        found = ["no answer"]

        def read() -> None:
            try:
                next(self._path.iterdir(), None)
                found[0] = ""
            except OSError as error:
                found[0] = error.strerror or str(error)

        # In a thread: a read cannot be interrupted while rclone retries.
        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        self._wait_until(lambda: not reading.is_alive(), is_wanted)
        return found[0]

    def _failure(self, what: str) -> RetryLater:
        """Close the mount, and return the error with what rclone has printed."""
        self.close()
        output = self._log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return RetryLater(f"{what} rclone's output: {output}")


def rclone_environment(address: Address, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an rclone for a store."""
    found = {**environment, **settings(address, environment)}
    if bundle := found.pop("AWS_CA_BUNDLE", None):
        # rclone fails with this variable, and has another one for the same purpose.
        found.setdefault("RCLONE_CA_CERT", bundle)
    return found


def settings(address: Address, environment: Mapping[str, str]) -> dict[str, str]:
    """Return rclone's settings for a store, as variables; see `rclone_environment`."""
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
        "NO_CHECK_BUCKET": "true",  # it exists, and write access need not include creating buckets
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
