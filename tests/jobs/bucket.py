"""Bucket of jobs under test: a prefix on a real S3 server, behind a proxy that delays requests."""

from __future__ import annotations

import itertools
import threading

from fault_proxy import FaultProxy
from holdfast.checkpoint.store import Store, open_store
from holdfast.jobs.writeback.journal import FOLDER
from servers import Server

_numbers = itertools.count()
SAVES = """
save() {
  head -c 9000000 /dev/urandom > out/data-$1.tmp
  mv out/data-$1.tmp out/data-$1
  echo $1 > out/marker-$1
}
"""
"""Data in two parts, then the marker that refers to them."""
MANY_SAVES = (
    SAVES.replace("9000000", "300000")
    + """
n=$(ls out | sed -n 's/marker-//p' | sort -n | tail -n 1)
for i in $(seq $((${n:-0} + 1)) 60); do save $i; echo saved $i; sleep 0.05; done
"""
)
"""Sixty small saves, of which another attempt makes those that are missing."""


class Bucket:
    """Prefix of the bucket, which jobs reach through the proxy and tests directly."""

    def __init__(self, s3: Server, proxy: FaultProxy) -> None:
        prefix = f"jobs{next(_numbers)}"
        self.url = s3.home(prefix, port=proxy.port, timeout="2", part_bytes="5MiB", parallel="1")
        self.store: Store = open_store(s3.home(prefix))

    def names(self) -> set[str]:
        return {entry.name for entry in self.store.list() if not entry.name.startswith(FOLDER)}

    @property
    def cached(self) -> str:
        return f'file_mounts: {{out: {{source: "{self.url}", mode: MOUNT_CACHED}}}}'


class Watcher:
    """Observer that lists the bucket continuously: a marker must never appear without its data."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._is_over = threading.Event()
        self.num_looks = 0
        self.wrong: list[set[str]] = []
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            # Markers are listed first, so the data can only have come meanwhile.
            marked = {name.removeprefix("marker-") for name in self._bucket.names() if "marker" in name}
            found = self._bucket.names()
            if {f"data-{one}" for one in marked} - found:
                self.wrong.append(found)
            self.num_looks += 1

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        assert self.num_looks > 1
        assert not self.wrong
