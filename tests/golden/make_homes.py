"""Golden homes: checkpoints and records of each kind, made once by release 0.1 and kept for ever.

Run from the repository root: `PYTHONPATH=src:tests python tests/golden/make_homes.py NEW_DIRECTORY`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import math
import os
import pathlib
import socket
import sys
import types
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import holdfast
from adapters.regions import save_regions
from checkpointer.sampling import SkippingSampler
from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.dtypes import TORCH_NAMES
from holdfast.checkpoint.format.layout import EvenPartitioning
from holdfast.checkpoint.format.values import EntryRef, SavedDataclass, SavedEnum, SavedNamedTuple, TensorRef
from holdfast.checkpoint.store.local import LocalStore
from making import CREATED_UNIX_S, LocalShard, make_checkpoint, make_home

Ranks = list[dict[str, torch.Tensor | LocalShard]]
VALUES: dict[str, Any] = {
    "plain": [None, True, 3, 0.1, "text \u00e9 \U0001f40c", {"nested": []}],
    "tensor": TensorRef("data.table"),
    "int": 2**80,
    "float": [float("inf"), float("-inf")],
    "tuple": (1, (2,)),
    "set": {3, 1, 2},
    "frozenset": frozenset({"b", "a"}),
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "complex": 1.5 - 2j,
    "range": range(2, 10, 3),
    "dict": {1: "one", (2, 3): "pair", "$tag": "dollar"},
    "odict": collections.OrderedDict([("b", 1), ("a", 2)]),
    "counter": collections.Counter({"x": 2}),
    "deque": collections.deque([1, 2], maxlen=5),
    "datetime": datetime.datetime(2026, 11, 21, 12, 30, 15, 250, tzinfo=datetime.timezone.utc),
    "date": datetime.date(2026, 11, 21),
    "timedelta": datetime.timedelta(days=-1, seconds=5, microseconds=7),
    "path": pathlib.Path("/data/train"),
    "ndarray": np.array([[1, 2], [3, 4]], dtype=np.int16),
    "npscalar": np.float32(0.5),
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
}
TYPES: dict[str, Any] = {
    "gan": {"g": EntryRef("gan.g"), "seen": [1, 2]},
    "gan.g": {},
    "config": SavedDataclass("train:Config", {"lr": 0.5, "table": TensorRef("config.table")}),
    "phase": SavedEnum("train:Phase", "WARM"),
    "parts": {SavedEnum("train:Parts", "HEAD|BODY"): 1},
    "point": SavedNamedTuple("train:Point", (("x", 1), ("y", (2, 3)))),
    "counts": collections.defaultdict(None, {"a": 1, 2: [3]}),
    "args": argparse.Namespace(seed=7),
    "bag": types.SimpleNamespace(items=[1]),
    "records": np.array([(1, [0.5, 1.5])], dtype=[("n", "<i4"), ("xy", "<f8", (2,))]),
    "record": np.array((1, "ab"), dtype=[("n", ">i2"), ("name", "<U3")])[()],
    "decimal": decimal.Decimal("1.50"),
    "uuid": uuid.UUID("12345678-1234-5678-1234-567812345678"),
    "slice": slice(1, None, 2),
}
METRICS = {"loss": 0.25, "rouge": float("nan"), "norm": float("inf")}
RECORDS = [
    run.Saved("golden-two", 2, 12),
    run.Emptied("golden-two", 1, CREATED_UNIX_S),
    run.Rollback("golden-two", 1, 1, 10, 11, 11, 1, "loss 9", {"data": (88, 96)}, ("order",), CREATED_UNIX_S),
    run.Refusal("golden-two", 1, 11, "rank 1 disagrees", 1, "rows"),
    run.SkippedNote("golden-two", 1, 10, "could not be read", CREATED_UNIX_S),
]
"""Records of the home of two ranks, under the names of `NAMES_OF_RECORDS`."""
NAMES_OF_RECORDS = [
    *(names.first_saved(2), names.emptied(1), names.rollback(1), names.refusal(11, 1), names.skipped(10, 1))
]
REGIONS = [[(0, 2), (3, 6), (9, 10)], [(2, 3), (6, 9)]]
"""Rows of each rank in the home of several regions."""


def bits(dtype: torch.dtype, count: int, first: int = 1) -> torch.Tensor:
    """`count` elements whose bytes are first, first + 1, ..."""
    raw = (torch.arange(count * dtype.itemsize) + first) % (2 if dtype is torch.bool else 251)
    return raw.to(torch.uint8).view(dtype)


def make(
    store: LocalStore, step: int, attempt: int, ranks: Sequence[Any], *, run_id: str, **options: Any
) -> None:
    """Make a checkpoint whose id is made of its run, step and attempt."""
    make_checkpoint(store, step, attempt, ranks, run_id=run_id, id=f"{run_id}-{step}-{attempt}", **options)


def make_one_rank(root: Path) -> None:
    """One rank, one step: a value of every tag, a finished run."""
    store = LocalStore(root)
    make_home(store, run_id="golden-one")
    tensors = {
        "model.weight": torch.arange(6.0).reshape(2, 3) / 4,
        "data.table": torch.arange(18_000, dtype=torch.int32),  # reaches over a chunk border
    }
    make(store, 7, 1, [tensors], values=[VALUES], run_id="golden-one")
    store.put(names.metrics(7, 1), run.document(run.Metrics("golden-one", 1, 7, METRICS)))
    store.put(names.DONE, run.document(run.Done("golden-one", 1, 7, CREATED_UNIX_S + 60)))


def make_two_ranks(root: Path) -> None:
    """Two ranks, two attempts: every dtype, empty and 0-dim, per rank, tied, split by rows and by columns."""
    store = LocalStore(root)
    make_home(store, run_id="golden-two", attempts=[1, 2])
    make(store, 10, 1, [{"w": torch.ones(2)}, {"v": torch.zeros(2)}], run_id="golden-two")
    grid = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    ranks: Ranks = [{}, {}]
    for index, (name, torch_name) in enumerate(TORCH_NAMES.items()):
        ranks[index % 2][f"dtype.{name}"] = bits(getattr(torch, torch_name), 3)
    ranks[0]["empty"] = torch.zeros(0, 3)
    ranks[1]["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    for rank in (0, 1):
        ranks[rank]["rng"] = bits(torch.uint8, 4 + rank, first=100 * rank)
        ranks[rank]["columns"] = (grid[:, 2 * rank : 2 * rank + 2].contiguous(), (0, 2 * rank), (3, 4))
    ranks[0]["rows"] = (grid[:1], (0, 0), (3, 4))
    ranks[1]["rows"] = (grid[1:], (1, 0), (3, 4))
    options = {"per_rank": ["rng"], "tied": {"head": "dtype.F32"}, "base": (1, 10)}
    values = [{"epoch": 1, "rank": 0}, {"epoch": 1, "rank": 1}]
    make(store, 12, 2, ranks, values=values, run_id="golden-two", **options)
    for name, record in zip(NAMES_OF_RECORDS, RECORDS, strict=True):
        store.put(name, run.document(record))


def make_sharded(root: Path) -> None:
    """Four ranks, regions by rules: along one dimension, both, one twice (strided); short and empty ones."""
    store = LocalStore(root)
    make_home(store, run_id="golden-sharded", attempts=[1, 2, 3])
    ranks: Ranks = [{} for _ in range(4)]
    partitionings = {
        "rows": EvenPartitioning(((0, 4),), (0, 1, 2, 3)),
        "mesh": EvenPartitioning(((0, 2), (1, 2)), (0, 1, 2, 3)),
        "strided": EvenPartitioning(((0, 2), (0, 2)), (0, 2, 1, 3)),
        "one.group": EvenPartitioning(((1, 2),), (3, 1)),
        "short": EvenPartitioning(((0, 4),), (3, 2, 1, 0)),
    }
    shapes = {"rows": (10, 3), "mesh": (5, 6), "strided": (10,), "one.group": (2, 5), "short": (2,)}
    for name, partitioning in partitionings.items():
        whole = torch.arange(math.prod(shapes[name]), dtype=torch.int32).reshape(shapes[name])
        for rank, region in partitioning.regions(shapes[name]):
            ranks[rank][name] = (whole[region.slices].contiguous(), region.offsets, shapes[name])
    ranks[0]["listed"] = (torch.arange(3), (0,), (4,))
    ranks[2]["listed"] = (torch.arange(3, 4), (3,), (4,))
    ranks[1]["scalar"] = torch.tensor(2.5)
    values, older = [{"rank": rank} for rank in range(4)], ((1, 10), (2, 20))
    options = {"partitionings": partitionings, "tied": {"head": "mesh"}, "values": values, "ancestors": older}
    make(store, 30, 3, ranks, run_id="golden-sharded", **options)


def make_types(root: Path) -> None:
    """One rank, one step: values whose types a checkpoint only names, objects in containers, newer tags."""
    store = LocalStore(root)
    make_home(store, run_id="golden-types")
    tensors = {"gan.g.weight": torch.arange(6.0), "config.table": torch.arange(3000, dtype=torch.int32)}
    make(store, 5, 1, [tensors], values=[TYPES], run_id="golden-types")


def make_frozen(root: Path) -> None:
    """Two ranks, two steps: tensors that train, and others that stay in a file of their own."""
    store = LocalStore(root)
    make_home(store, run_id="golden-frozen")
    for step in (1, 2):
        ranks: Ranks = [
            {"adapter": torch.full((4,), float(step)), "base": torch.arange(500, dtype=torch.int16)},
            {"head": torch.arange(2.0) + step, "split.base": (torch.ones(3), (2,), (5,))},
        ]
        ranks[0]["split.base"] = (torch.zeros(2), (0,), (5,))
        options = {"frozen": ["base", "split.base"], "tied": {"alias": "base"}}
        make(store, step, 1, ranks, run_id="golden-frozen", **options)


def state_of_regions() -> dict[str, Any]:
    """Return the state of the home of several regions."""
    return {
        "w": torch.arange(40, dtype=torch.float32).reshape(10, 4),
        "b": torch.arange(10, dtype=torch.int16),
        "note": "several regions",
    }


def make_run(home: Path) -> None:
    """Train two real ranks with all watches: a spike, a rollback, a finished run, its metrics and history."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29531", "WORLD_SIZE": "2"}
    mp.spawn(_train, (str(home),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]


def _train(rank: int, home: str) -> None:
    _hide_machine()
    dist.init_process_group("gloo", rank=rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = SkippingSampler(8)
    state = {"model": model, "optimizer": optimizer, "data": data}
    watches = [holdfast.Spike("rollback", back=5)]
    with holdfast.Checkpointer(home, state, every=10, keep=2, watches=watches, quiet=True) as ckpt:
        for step in ckpt.steps(64):
            data.take()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            is_spike = step >= 50 and ckpt.attempt == 1
            ckpt.record(loss=100.0 if is_spike else 1.0 + 0.01 * (step % 7))
    dist.destroy_process_group()
    holdfast.hard_exit()


def _hide_machine() -> None:
    """Write a fixed host and process id into the files."""
    socket.gethostname = lambda: "host"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True)  # never over what is there
    make_one_rank(target / "one-rank")
    make_two_ranks(target / "two-ranks")
    make_sharded(target / "sharded")
    make_frozen(target / "frozen")
    make_types(target / "types")
    make_run(target / "run")
    _hide_machine()
    save_regions(target / "several-regions", 3, state_of_regions(), REGIONS)
