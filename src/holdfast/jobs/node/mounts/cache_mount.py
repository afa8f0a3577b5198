"""Mount of a job's write-back directory that can be stopped while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.node.mounts.mount_spec import MountSpec
from holdfast.jobs.writeback import Mount, mount

_SLICE_S = 0.2  # interval for checking whether a mount in progress is still wanted


def mount_write_back(
    spec: MountSpec, owner: str, attempt: int, is_wanted: Callable[[], bool], *, fetch: bool = True
) -> Mount:
    """Mount a write-back directory, or join its uploader.

    Raises:
        HoldfastError: see `holdfast.mount`.

    Blocks: until it is mounted or no longer wanted.
    """
    held: list[Mount | HoldfastError] = []

    def make() -> None:
        try:
            held.append(
                mount(
                    spec.path,
                    spec.place,
                    fetch=fetch,
                    fetch_bytes=spec.fetch_bytes,
                    owner=owner,
                    attempt=attempt,
                    is_shared=spec.is_shared,
                    timeout_s=None,
                )
            )
        except HoldfastError as error:
            held.append(error)

    # In a thread, as it may take as long as the bucket's retries, while this process may have to exit.
    making = threading.Thread(target=make, daemon=True)
    making.start()
    while making.is_alive():
        making.join(_SLICE_S)
        if making.is_alive() and not is_wanted():
            raise RetryLater(f"Mounting {spec.place} was stopped: no process waits for it any more.")
    if isinstance(held[0], HoldfastError):
        raise held[0]
    return held[0]
