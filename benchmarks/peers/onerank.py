"""A process group of one rank, which some engines ask for even where they exchange nothing."""

from __future__ import annotations

import os

import torch.distributed as dist


def join() -> None:
    """Make the group, unless the process has one.

    Its store has a socket, as under `torchrun`: one in a file blocks once the benchmark deletes its folder.
    """
    if not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        store = dist.TCPStore("127.0.0.1", 0, 1, True)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
