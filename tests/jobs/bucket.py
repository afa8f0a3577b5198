"""Bucket of jobs under test: a prefix on a real S3 server, behind a proxy that delays requests."""

from __future__ import annotations

import itertools

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
