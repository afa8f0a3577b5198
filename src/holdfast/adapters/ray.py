"""Checkpoints of Ray Train that contain only the home and the step of a checkpoint."""

# Ray is not in every environment.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

import holdfast
from holdfast import Checkpoint, Checkpointer
from holdfast.adapters.kit.run import check_versions
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import InvalidInput
from holdfast.system.documents import Count, decode_as, to_plain
from holdfast.system.linux.partial_files import temporary_folder

_NAME = "holdfast-checkpoint.json"
_MAX_BYTES = 64 << 10

check_versions("ray", {"ray": (2, 50)})

import ray.train  # noqa: E402 - the check is first

__all__ = ["open", "report"]

_reported: dict[str, int] = {}  # newest step that this process has reported, by home


class _Reference(Struct, frozen=True):
    home: str
    step: Count


def report(checkpointer: Checkpointer, metrics: Mapping[str, Any], **options: Any) -> None:
    """Report metrics to Ray Train, with the newest checkpoint in home if it is new.

    Ray's checkpoint is a file that contains the home and the step. Its content is not copied, and Ray's
    `CheckpointConfig` deletes only that file. `keep=` of the Checkpointer decides what home contains.

    Args:
        checkpointer: Checkpointer of the training function.
        metrics: values by name, as for `ray.train.report`.
        options: other arguments of `ray.train.report`.

    Raises:
        InvalidInput: `options` contain a checkpoint.
        RetryLater: home could not be listed.

    Ranks: collective; every worker calls it.
    Blocks: for a listing of home on rank 0, and as `ray.train.report`.
    """
    if "checkpoint" in options:
        raise InvalidInput(
            "report() makes the checkpoint. Leave checkpoint= out, or call ray.train.report()."
        )
    home, is_first = checkpointer.home, ray.train.get_context().get_world_rank() == 0
    newest = max(candidates(list_home(open_store(home))), default=None) if is_first else None
    if newest is None or _reported.get(home) == newest.step:
        ray.train.report(dict(metrics), **options)
        return
    with temporary_folder("ray") as folder:
        text = json.dumps(to_plain(_Reference(home, newest.step)))
        Path(folder, _NAME).write_text(text + "\n")
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder), **options)
    _reported[home] = newest.step


def open(checkpoint: ray.train.Checkpoint) -> Checkpoint:
    """Return the checkpoint in home that a checkpoint of Ray Train names, such as `result.checkpoint`.

    Raises:
        InvalidInput: another program made the checkpoint, or its home would send your keys to a server that
            neither this process reported to nor an environment variable names.
        NotFound: home does not contain it any more; see `keep=` of the Checkpointer.
        Corrupt: the file in Ray's checkpoint is damaged.
    """
    with checkpoint.as_directory() as folder:
        path = Path(folder, _NAME)
        if not path.is_file():
            raise InvalidInput(
                f"{checkpoint.path} has no {_NAME}: holdfast.adapters.ray.report() did not make it. Read it "
                "as the program does that made it."
            )
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    what = f"{_NAME} of {checkpoint.path}"
    found = decode_as(_Reference, text, what, max_bytes=_MAX_BYTES)
    if found.home not in _reported:
        check_endpoint(found.home, what)
    return holdfast.open(found.home, found.step)
