"""Readers of what trackers have stored: the curves by name, as (step, value) in the order of logging."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

Curves = dict[str, list[tuple[int, float]]]


def read(library: str, folder: Path) -> Curves:
    """Return the curves that a library has stored in a folder."""
    return {"mlflow": _read_mlflow, "tensorboard": _read_tensorboard, "wandb": _read_wandb}[library](folder)


def _read_mlflow(folder: Path) -> Curves:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(folder.as_uri())
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert len(runs) <= 1
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for run in runs
        for name in run.data.metrics
    }


def _read_tensorboard(folder: Path) -> Curves:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        name: [(one.step, one.value) for one in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def _read_wandb(folder: Path) -> Curves:
    """Read the files of all starts, oldest first, as `wandb sync` does."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found: Curves = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for raw in _logged(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(raw)
            if record.WhichOneof("record_type") != "history":
                continue
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    row = record.history.step.num, json.loads(item.value_json)
                    found.setdefault(name, []).append(row)
    return found


def _logged(file: bytes) -> Iterator[bytes]:
    """Yield the records of a file of W&B, as far as it is whole.

    wandb 0.31 has no reader of its own in Python. The format is LevelDB's log, after a header of 7 bytes:
    blocks of 32 KiB; each piece of a record has a checksum, a length and a type.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    assert b":W&B".startswith(file[:4])  # a file that was just created is empty
    record, place, block = b"", 7, 32 << 10
    while place + 7 <= len(file):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", file, place)
        piece = file[place + 7 : place + 7 + length]
        if kind == 0 or len(piece) < length:
            return
        record = piece if kind in (1, 2) else record + piece  # whole, first, middle, last
        place += 7 + length
        if kind in (1, 4):
            yield record
