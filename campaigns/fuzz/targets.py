"""Everything that reads what others wrote, each with seeds that it accepts and mutations that suit them."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from msgspec import to_builtins

from campaigns.fuzz.mutation import (
    Mutation,
    mutate_bytes,
    mutate_json,
    mutate_lines,
    mutate_sealed,
    mutate_text,
)
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.errors import Corrupt, InvalidInput


@dataclass(frozen=True, slots=True)
class Target:
    """One parser."""

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    mutate: Mutation


# -- documents of a home -----------------------------------------------------------------------------------


@cache
def home_documents() -> dict[str, bytes]:
    """A home with three checkpoints of two ranks, by name of the object."""
    import torch

    from holdfast.checkpoint.format import names, run
    from holdfast.checkpoint.format.layout import EvenPartitioning
    from holdfast.checkpoint.format.sealed import dumps
    from holdfast.checkpoint.store.memory import MemoryStore
    from tests.making import make_checkpoint, make_home

    store = MemoryStore("fuzz")
    make_home(store, attempts=(1, 2))
    for step, attempt in ((10, 1), (20, 1), (30, 2)):
        ranks = [
            {
                "model.w": (torch.arange(8.0) + step, (8 * rank,), (16,)),
                "model.b": (torch.ones(2, 2) * rank, (2 * rank, 0), (4, 2)),
                f"only{rank}": torch.ones(3),
                "rng": torch.zeros(16, dtype=torch.uint8),
            }
            for rank in range(2)
        ]
        values = [{"epoch": step, "state": {1: (1, "a", 2.5), "b": {1, 2}, "c": b"xy", "d": 2**70}}] * 2
        make_checkpoint(
            store,
            step,
            attempt,
            ranks,
            per_rank=("rng",),
            tied={"head": "model.w"},
            values=values,
            base=(1, 20) if attempt == 2 else None,
            partitionings={"model.b": EvenPartitioning(((0, 2),), (0, 1))},
            frozen=("only1",),
        )
    facts = {"attempt": 1, "rank": 0, "bytes": 10**6, "seconds": 0.5, "tier": "home", "detail": "x"}
    kinds = ("claimed", "staged", "persisted", "committed", "restored", "failed", "preempted", "closed")
    lines: list[dict[str, Any]] = [
        {"t": 1.0 + i, "event": kind, "step": 10 * (1 + i % 3), **facts} for i, kind in enumerate(kinds)
    ]
    lines.append({"t": 12.0, "event": "metrics", "steps": [1, 2], "values": {"loss": [0.5, "nan"]}})
    store.put(names.history(1, 0), b"".join(dumps(line) + b"\n" for line in lines))
    store.put(names.DONE, run.document(run.Done("run-one", 2, 30, 1.5)))
    store.put(names.first_saved(2), run.document(run.Saved("run-one", 2, 30)))
    store.put(names.metrics(20, 1), run.document(run.Metrics("run-one", 1, 20, {"loss": 0.5})))
    store.put(names.skipped(20, 2), run.document(run.SkippedNote("run-one", 2, 20, "why", 2.5)))
    return {entry.name: store.get(entry.name) for entry in store.list()}


def _named(part: str) -> Callable[[], list[bytes]]:
    return lambda: [
        data for name, data in home_documents().items() if part in name and name.endswith(".json")
    ]


def _run_part(data: bytes) -> None:
    from holdfast.checkpoint.format import part
    from holdfast.checkpoint.home.documents import check_part

    check_part(part.parse(data, "part"), 0, "part")


def _run_manifest(data: bytes) -> None:
    from holdfast.checkpoint.format import names
    from holdfast.checkpoint.home.documents import check_files, read_manifest
    from holdfast.checkpoint.home.listing import list_home
    from holdfast.checkpoint.store.memory import MemoryStore

    store = MemoryStore("fuzz")
    store.put(names.manifest(30, 2), data)
    manifest = read_manifest(store, CheckpointId(attempt=2, step=30), None)
    with contextlib.suppress(Corrupt):
        check_files([list_home(store)], manifest)
    tensor = manifest.tensors.get("model.w")
    if tensor is not None and tensor.partitioning is not None:
        list(tensor.partitioning.regions(tensor.shape))


def _catalogs() -> list[bytes]:
    from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
    from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Region, whole

    regions = ListedPartitioning(
        ((0, Region((0, 0), (2, 4))), (1, Region((2, 0), (2, 1))), (2, Region((2, 1), (2, 3))))
    )
    tensors = {
        "a": Tensor("F32", (4, 4), regions, (0, 1, 2)),
        "b": Tensor("BF16", (8,), EvenPartitioning(((0, 3),), (2, 0, 1)), (0, 1, 2), True),
        "c": Tensor("I64", (), whole(1), (1,)),
        "d": Tensor("F32", (4, 4), regions, (0, 1, 2)),
    }
    return [catalog_text(Catalog(tensors, {"e": "a"}))]


def _run_catalog(data: bytes) -> None:
    from holdfast.checkpoint.format.agreement import agree
    from holdfast.checkpoint.format.catalog import parse_catalog

    catalog = parse_catalog(data, "catalog")
    for rank in range(3):
        list(catalog.written_by(rank))
    agree((data,), (0, 0, 0))


def _value_seeds() -> list[bytes]:
    import argparse
    import collections
    import datetime
    import decimal
    import pathlib
    import types
    import uuid

    import numpy
    import torch

    from holdfast.checkpoint.format.composites import SPARSE, UNDER, SavedTensor
    from holdfast.checkpoint.format.sealed import dumps
    from holdfast.checkpoint.format.values import (
        EntryRef,
        SavedDataclass,
        SavedEnum,
        SavedNamedTuple,
        TensorRef,
        encode,
    )

    values = [
        {"a": [1, 2.5, None, True, "x"], 3: (1, {2}, frozenset({3})), "b": b"abc", "c": bytearray(b"x")},
        [2**80, complex(1, 2), range(3), collections.OrderedDict(a=1), collections.Counter("aab")],
        [collections.deque([1, 2], maxlen=3), datetime.datetime(2020, 1, 2), datetime.timedelta(1, 2, 3)],
        [
            datetime.date(2020, 1, 2),
            pathlib.PurePosixPath("/a/b"),
            numpy.arange(6).reshape(2, 3),
            numpy.float32(2),
        ],
        [
            torch.float32,
            torch.device("cpu"),
            torch.Size([1, 2]),
            float("nan"),
            numpy.array(["ab"]),
            {"$x": 1},
        ],
        [decimal.Decimal("1.5"), uuid.UUID(int=5), slice(1, None, 2)],
        [
            SavedEnum("m:E", "A"),
            SavedNamedTuple("m:P", (("x", 1), ("y", [TensorRef("t")]))),
            SavedDataclass("m:C", {"lr": 0.5, "phase": SavedEnum("m:E", "A|B")}),
            {SavedEnum("m:E", "A"): {SavedEnum("m:E", "B")}},
        ],
        {"g": EntryRef("a.g"), "list": [EntryRef("a.list.0"), 1]},
        [
            SavedTensor("m:C", {"codes": TensorRef("t.codes")}, {"shape": [2], "context": [True, None]}),
            SavedTensor("dtype", {"raw": TensorRef("t.raw")}, {"dtype": "complex128"}),
            SavedTensor("sparse_csr", dict.fromkeys(SPARSE["sparse_csr"], TensorRef("t")), {"size": [1, 1]}),
        ],
        {
            UNDER: {
                "w": SavedTensor(
                    "dtensor",
                    {
                        "local": SavedTensor(
                            "sparse_coo",
                            {"indices": TensorRef("i"), "values": TensorRef("v")},
                            {"size": [1], "coalesced": False},
                        )
                    },
                    {"shape": [2], "offsets": [0], "sizes": [1]},
                )
            }
        },
        [collections.defaultdict(None, a=[1]), argparse.Namespace(a=1), types.SimpleNamespace(b=[2])],
        numpy.zeros((2, 1), [("a", "<i4"), ("b", [("x", "U2"), ("y", "f8", (2,))])]),
        numpy.zeros((), [("a", "<i4")])[()],
    ]
    return [dumps(encode(value, "value")) for value in values]


def _run_value(data: bytes) -> None:
    from holdfast.checkpoint.format import values
    from holdfast.checkpoint.format.limits import MAX_DEPTH
    from holdfast.system.documents import decode

    values.decode(decode(data, "values", max_depth=MAX_DEPTH))


def _run_plain_forms(data: bytes) -> None:
    """Bring a value into the forms in which readers show and export it."""
    from holdfast.checkpoint.format import values
    from holdfast.checkpoint.format.limits import MAX_DEPTH
    from holdfast.checkpoint.format.nesting import composites, place_entries, plain_form
    from holdfast.system.documents import decode

    value = values.decode(decode(data, "values", max_depth=MAX_DEPTH))
    place_entries({"a": plain_form(value), "a.g": {"w": 1}, "a.list.0": plain_form(value)})
    list(composites(value, "a"))


def _run_fitting(data: bytes) -> None:
    """Fit a value to live ones, as a restore does."""
    import argparse
    import collections
    import enum
    import types
    import warnings

    import torch

    from holdfast.checkpoint.format import values
    from holdfast.checkpoint.format.limits import MAX_DEPTH
    from holdfast.checkpoint.state.fitting import GONE, Fitting, Updates
    from holdfast.checkpoint.state.tree import insert_tensors
    from holdfast.system.documents import decode

    kind = enum.Flag("E", ["A", "B"], module="m")
    pair = collections.namedtuple("P", "x y", module="m")
    with warnings.catch_warnings():  # torch warns at the first one of a process
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        sparse = torch.eye(1).to_sparse_csr()
    live = [
        {kind.A: {kind.B}, "g": 1, "list": [2]},
        [kind.A, pair(1, [2]), argparse.Namespace(a=1), types.SimpleNamespace(b=[2])],
        collections.defaultdict(lambda: kind.A),
        [
            torch.zeros(1, dtype=torch.complex128),
            torch.zeros(1, dtype=torch.complex128),
            sparse,
        ],
    ]
    for one in live:
        with contextlib.suppress(InvalidInput):
            saved = values.decode(decode(data, "values", max_depth=MAX_DEPTH))
            tree = Fitting().fit(saved, one, "a", is_here=True)
            Updates().update(one, insert_tensors(one if tree is GONE else tree, lambda _: torch.zeros(1)))


def _run_documents() -> list[bytes]:
    from holdfast.checkpoint.format import run

    return [
        run.document(run.Run("run-one", 1.5)),
        run.document(run.AttemptClaim(3, "run-one", 2, "host", 77, 2.5)),
        run.document(run.Done("run-one", 3, 40, 2.5)),
        run.document(run.Refusal("run-one", 3, 40, "why", 1, "model.w")),
        run.document(run.SkippedNote("run-one", 3, 40, "why", 2.5)),
    ]


def _run_run(data: bytes) -> None:
    from holdfast.checkpoint.format import run

    for cls in (run.Run, run.AttemptClaim, run.Done, run.Refusal, run.SkippedNote):
        with contextlib.suppress(Corrupt):
            run.parse(cast("type[Any]", cls), data, "document")


def _run_sealed(data: bytes) -> None:
    from holdfast.checkpoint.format.sealed import Versions, unseal_lines

    with contextlib.suppress(Corrupt):
        Versions("egg", 1, {1: dict[str, Any]}).unseal(data, "document")
    unseal_lines(data, "document")


def _run_history(data: bytes) -> None:
    from holdfast.checkpoint.home.history import read_lines
    from holdfast.checkpoint.store.memory import MemoryStore
    from holdfast.watch.report import saves

    store = MemoryStore("fuzz")
    store.put("history/a0001-rank-00000.jsonl", data)
    lines, _ = read_lines(store)
    saves.parse_events(lines)


def _history() -> list[bytes]:
    return [data for name, data in home_documents().items() if name.startswith("history/")]


# -- homes with every command ------------------------------------------------------------------------------


def _home_seeds() -> list[bytes]:
    return [
        name.encode() + b"\0" + data
        for name, data in home_documents().items()
        if name.endswith((".json", ".jsonl"))
    ]


def _mutate_home(case: bytes, chance: random.Random) -> bytes:
    name, _, data = case.partition(b"\0")
    mutate = mutate_lines if name.endswith(b"jsonl") else mutate_sealed
    if not chance.randrange(12):
        name = chance.choice(
            (
                b"attempts/a" + b"9" * 200 + b".json",
                b"step-00000040/manifest-a0003.json",
                b"attempts/a0009.json",
                name + b"x",
            )
        )
    return name + b"\0" + mutate(data, chance)


def _run_home(case: bytes, command: str) -> None:
    from holdfast import cli

    name, _, data = case.partition(b"\0")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-home-"))
    try:
        for one, content in {**home_documents(), name.decode("utf-8", "replace"): data}.items():
            path = folder / one
            if "\0" in one or ".." in path.parts or one.startswith("/"):
                return
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except OSError:
                return
        _COMMANDS[command](folder, cli)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _call(*words: str) -> Callable[[Path, Any], None]:
    def act(folder: Path, cli: Any) -> None:
        out = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            contextlib.suppress(SystemExit),
        ):
            cli.main([word.replace("HOME", str(folder)) for word in words])
        if "Traceback" in out.getvalue() or "internal" in out.getvalue().lower():
            raise AssertionError(out.getvalue()[-2000:])

    return act


def _restore(folder: Path, _: Any) -> None:
    import torch

    from holdfast.checkpoint.ranks import Ranks
    from holdfast.checkpoint.restore.candidates import Request
    from holdfast.checkpoint.restore.resume import restore_newest
    from holdfast.checkpoint.state import load  # noqa: F401 - imported before time is counted
    from holdfast.checkpoint.state.load import FillTarget
    from holdfast.checkpoint.store import open_store

    class Loading:
        def __init__(self) -> None:
            self.targets = {"model.w": [FillTarget(torch.zeros(16))], "only0": [FillTarget(torch.zeros(3))]}

        def finish(self) -> None:
            return

    found = restore_newest(
        Request(open_store(folder), lambda manifest, values: Loading(), Ranks(timeout_s=60.0), patience_s=0.0)
    )
    assert found is not None
    assert found.step in (10, 20, 30, 40)


_COMMANDS: dict[str, Callable[[Path, Any], None]] = {
    "ls": _call("ls", "HOME", "--json"),
    "show": _call("show", "HOME", "--json"),
    "history": _call("history", "HOME"),
    "verify": _call("verify", "HOME"),
    "report": _call("report", "HOME", "-o", "HOME/../report.html", "--overwrite"),
    "restore": _restore,
}


# -- compile cache, write-back, jobs ------------------------------------------------------------------------


def _index_seeds() -> list[bytes]:
    from holdfast.watch.compiled.transfer import CacheIndex, PackedFile, document

    files = tuple(PackedFile(f"ab/kernel{i}.so", 4, "0" * 32, 0, 12 * i, 12) for i in range(3))
    return [document(CacheIndex(3, 1, 2, {"cpu": "avx2", "torch": "2.13"}, ("1" * 32,), files))]


def _run_index(data: bytes) -> None:
    from holdfast.watch.compiled import transfer

    transfer.parse(data, str(transfer.IndexName(3, 1, 2, "0" * 32)))


def _pack_seeds() -> list[bytes]:
    from holdfast.watch.compiled.transfer import pack

    whole, _ = pack({"a": b"\x7fELF" * 100, "b": bytes(1000)})
    return [whole]


def _run_pack(data: bytes) -> None:
    from holdfast.watch.compiled.transfer import PackedFile, unpack

    for offset in (0, 30):
        with contextlib.suppress(Corrupt):
            unpack(data, PackedFile("a", 400, "0" * 32, 0, offset, len(data)), "pack")


@cache
def _journal_seed() -> bytes:
    from holdfast.jobs.writeback.files import Fingerprint
    from holdfast.jobs.writeback.journal import FILE, FOLDER, JournaledQueue
    from holdfast.jobs.writeback.upload_queue import Sent, Upload, UploadProblem, Version

    folder = Path(tempfile.mkdtemp(prefix="fuzz-journal-"))
    try:
        (folder / FOLDER).mkdir()
        journal = JournaledQueue(folder)
        mark = Fingerprint(10, 20, 30)
        journal.do(
            lambda queue: queue.writes.extend(
                [
                    ("entry", 1, Upload(1, "a/b", Version("copy", mark, "0" * 32), "watch")),
                    ("entry", 2, Upload(2, "c", None, "scan")),
                    ("sent", "d", Sent(mark, "0" * 32)),
                    ("problem", "e", UploadProblem("torn", "why", mark)),
                ]
            )
        )
        journal._base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        journal._base.execute("PRAGMA journal_mode=DELETE")
        journal.close()
        return (folder / FOLDER / FILE).read_bytes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_journal(data: bytes) -> None:
    from holdfast.jobs.writeback.journal import FILE, FOLDER, Journal

    folder = Path(tempfile.mkdtemp(prefix="fuzz-journal-"))
    try:
        (folder / FOLDER).mkdir()
        (folder / FOLDER / FILE).write_bytes(data)
        journal = Journal(folder)
        try:
            journal.load()
        finally:
            journal.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _mutate_journal(data: bytes, chance: random.Random) -> bytes:
    """Change cells of the tables through SQLite, or bytes of the file."""
    if not data or not hasattr(sqlite3.Connection, "deserialize") or chance.randrange(3) == 0:
        return mutate_bytes(data, chance)
    base: Any = sqlite3.connect(":memory:")  # serialize and deserialize are new in Python 3.11
    try:
        base.deserialize(data)
        table, column = chance.choice(("fact", "entry", "sent", "problem")), chance.choice(("key", "value"))
        strange = (None, "x", b"\xff\xfe", -1, 2**62, 1.5, "[" * 5000, "9" * 5000, "null", "x" * 10**5)
        text = chance.choice(base.execute(f"SELECT value FROM {table} LIMIT 9").fetchall() or [("{}",)])[0]
        value = chance.choice((*strange, mutate_bytes(str(text).encode(), chance).decode("utf-8", "replace")))
        if chance.randrange(6) == 0:
            recursive = (
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
                "SELECT i AS key, i AS value FROM n"
            )
            statement = chance.choice(
                (
                    f"DROP TABLE {table}",
                    f"ALTER TABLE {table} ADD COLUMN more",
                    f"DROP TABLE {table};CREATE VIEW {table} AS {recursive}",
                )
            )
            base.executescript(statement)
        else:
            base.execute(f"UPDATE {table} SET {column} = ?", (value,))
        base.execute(
            "INSERT OR REPLACE INTO fact VALUES ('last', ?)", (str(chance.choice((1, "x", "[]", "1e9"))),)
        )
        base.commit()
        return base.serialize()
    except (sqlite3.Error, UnicodeDecodeError):
        return mutate_bytes(data, chance)
    finally:
        base.close()


def _messages() -> list[bytes]:
    from holdfast.checkpoint.keeper import messages

    members = {"steps": [1, 2], "values": {"loss": [0.5, None]}}
    every = (
        messages.SubmitSave(5, 1, (1, 2), messages.ArenaLayout(100), to_home=True),
        messages.RecordEvent("metrics", 3, 1.5, 4, 0.5, "x", "home", members),
        messages.DrainCheckpoint(1, 2),
        messages.ArenaReleased(1),
        messages.SaveFailed(5, "Corrupt", "why"),
        messages.ArenaImages((messages.Image("step-00000001/rank-00000-a0001.safetensors", 0, 4096),)),
    )
    return [messages.encode(one) for one in every]


def _run_message(data: bytes) -> None:
    import socket

    from holdfast.checkpoint.keeper import packets

    a, b = packets.make_pair()
    with a, b, contextlib.suppress(OSError):
        b.setblocking(False)
        a.setblocking(False)
        a.send(data)
        a.shutdown(socket.SHUT_WR)
        packets.receive(b)


def _run_struct(cls: type, data: bytes) -> None:
    from holdfast.system.documents import decode_as

    decode_as(cls, data, "document", any_text=True)


def _struct_seeds(value: Any) -> list[bytes]:
    return [json.dumps(to_builtins(value)).encode()]


def _records() -> dict[str, Callable[[], Any]]:
    """Values that one process writes for another, each made when it is needed."""

    def keeper_config() -> Any:
        from holdfast.checkpoint.keeper.config import KeeperConfig
        from holdfast.checkpoint.retention import Keep

        return KeeperConfig(
            "/home", "run", 1, 0, 2, True, Keep(3), 60.0, 5.0, local="/local", local_ranks=(0, 1)
        )

    def keeper_lockfile() -> Any:
        from holdfast.checkpoint.keeper.lockfile import KeeperInfo

        return KeeperInfo(1, 0, 77, 12345, busy=True, held="a.sock")

    def uploader_config() -> Any:
        from holdfast.jobs.writeback.config import UploaderConfig

        return UploaderConfig("/data", "s3://bucket/x")

    def life() -> Any:
        from holdfast.jobs.outcome import Outcome, Phase
        from holdfast.jobs.state_machine import JobState

        return JobState(attempt=2, outcomes={0: Outcome(next(iter(Phase)), 1, None)})

    def node_plan() -> Any:
        from holdfast.jobs.node_spec import NodeSpec

        return NodeSpec("h", None, "/run", "/set", "/w", "/l", "/b", "/n", {"A": "b"}, 30.0)

    def tag_plan() -> Any:
        from holdfast.adapters.nebula.tag_writer import TagPlan

        return TagPlan((0, 1), 5, True, None, True)

    return {
        "keeper-config": keeper_config,
        "keeper-lockfiles": keeper_lockfile,
        "uploader-config": uploader_config,
        "job-states": life,
        "node-plans": node_plan,
        "nebula-plans": tag_plan,
    }


def _run_record(make: Callable[[], Any], data: bytes) -> None:
    _run_struct(type(make()), data)


# -- notices, words and texts -------------------------------------------------------------------------------


def _notice_seeds() -> list[bytes]:
    event = {
        "EventId": "1",
        "EventType": "Preempt",
        "Resources": ["vm1"],
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
    }
    every = [
        {"DocumentIncarnation": 1, "Events": [event]},
        {"action": "terminate", "time": "2017-09-18T08:22:00Z"},
        {"source": "x", "detail": "y", "deadline_unix_s": 1.5, "is_final": True},
    ]
    return [json.dumps(one).encode() for one in every] + [b"TRUE", b"TERMINATE_ON_HOST_MAINTENANCE"]


def _run_notice(data: bytes) -> None:
    from holdfast.watch.preemption import sources
    from holdfast.watch.preemption.sources import Unreachable, read_notice

    text = data.decode("utf-8", "replace")
    aws, azure = sources.Aws(), sources.Azure()
    aws._get = lambda path: text  # type: ignore[method-assign]
    aws.poll()
    azure._machine = "vm1"
    azure._get = lambda path, timeout_s: text  # type: ignore[method-assign]
    with contextlib.suppress(Unreachable):
        azure.poll()
    with tempfile.NamedTemporaryFile() as out:
        out.write(data)
        out.flush()
        read_notice(Path(out.name))


def _run_progress(data: bytes) -> None:
    from holdfast.system.environment import read_progress

    with tempfile.NamedTemporaryFile() as out:
        out.write(data)
        out.flush()
        read_progress(Path(out.name))


def _run_marker(data: bytes) -> None:
    from holdfast.adapters.nebula.tag_index import _FIRST_LINE, PartitionMarker

    with tempfile.NamedTemporaryFile() as out:
        out.write(_FIRST_LINE.encode() + data)
        out.flush()
        PartitionMarker.read(out.name)


def _rank_messages() -> list[bytes]:
    from holdfast.checkpoint.format.messages import pack

    every = [{"step": 5, "names": ["a", "b"]}, ("x", (1, None)), Corrupt("why", step=3, rank=1, key="w")]
    return [pack(one) for one in every]


def _run_rank_message(data: bytes) -> None:
    from holdfast.checkpoint.format.messages import unpack

    unpack(data, "rank 1")


def _kind_seeds() -> list[bytes]:
    every = [
        [[[], "namespace", None]],
        [[["a"], "state-dict", None], [["a"], "versions", [["", {"version": 1}]]]],
        [
            [["b", 0], "simple-namespace", None],
            [[], "deepspeed.utils.tensor_fragment.fragment_address", None],
        ],
    ]
    return [json.dumps(one).encode() for one in every]


def _run_kinds(data: bytes) -> None:
    from holdfast.checkpoint.exchange.packed_value import checked_metadata, unpack
    from holdfast.system.documents import decode

    found = decode(data, "kinds")
    with checked_metadata("model"):
        kinds = [(tuple(path), kind, detail) for path, kind, detail in found]
        unpack({"a": {"x": 1}, "b": [{"y": 2}]}, kinds)


def _run_committed(data: bytes) -> None:
    from holdfast.checkpoint.home.losses import find_losses
    from holdfast.checkpoint.store.memory import MemoryStore
    from holdfast.errors import HoldfastError

    store = MemoryStore("fuzz")
    store.put("history/a0001-rank-00000.jsonl", data)
    with contextlib.suppress(HoldfastError):
        list(find_losses([store]))


def _run_unsent(data: bytes) -> None:
    from holdfast.jobs.journal import read_document
    from holdfast.jobs.node.mounts.attempt import UnsentFiles

    with tempfile.NamedTemporaryFile() as out:
        out.write(data)
        out.flush()
        read_document(Path(out.name), UnsentFiles)


def _run_slurm(data: bytes) -> None:
    from holdfast.jobs.slurm.job_files import Inbox, NodeReport

    list(Inbox(NodeReport).feed(data + b"\n"))


def _run_queue(data: bytes) -> None:
    from holdfast.jobs.sky.commands import parse_queue

    parse_queue(data.decode("utf-8", "replace"))


_TASK = b"""\
name: gpt
num_nodes: 2
workdir: .
resources:
  accelerators: {A100: 8}
  cpus: 8+
  use_spot: true
  job_recovery:
    max_restarts_on_errors: 3
file_mounts:
  /data: s3://bucket/data
  /ckpt: {name: b, mode: MOUNT, store: s3}
envs: {A: "1", B: x}
secrets: {KEY: y}
setup: |
  pip install x
run: |
  python train.py
"""
_YAML_WORDS = (
    *(
        b"&a ",
        b"*a",
        b"<<: *a",
        b"\n- ",
        b"\n  ",
        b": ",
        b"{",
        b"}",
        b"[",
        b"]",
        b"!!python/object:os.system ",
        b"!!binary x",
    ),
    *(
        b"!!set {a}",
        b"!!timestamp 2000-99-99",
        b"!!int 0b",
        b"!!float x",
        b"!!bool x",
        b"1:99:1",
        b"0x",
        b"0o9",
        b"---\n",
        b"? ",
    ),
    *(
        b"2001-12-32",
        b"2001-12-14t21:59:43.10-99:00",
        b".inf",
        b"~",
        b"[&b [*b]]",
        b"9" * 5000,
        b"\x00",
        b"\xf0\x9f",
        b"1e999",
    ),
    b"a: &a [x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c]\n" % (c + 1, c + 1, *(c,) * 6) for c in b"abcdefgh"),
)


def _run_task(data: bytes) -> None:
    from holdfast.jobs.task.parser import parse_tasks

    parse_tasks(data.decode("utf-8", "replace"), "task.yaml")


_WORDS = (
    *(
        b"8GiB",
        b"10m",
        b"1.5h",
        b"-1",
        b"1e9",
        b"inf",
        b"nan",
        "٣".encode(),
        "²".encode(),
        b"9" * 400,
        b"s3://b/p?region=x",
    ),
    *(
        b"gs://b",
        b"az://c/p?account=a",
        b"s3://b?endpoint_url=http://[",
        b"s3://u:p@b",
        b"file://x",
        b"://",
        b"?part_bytes=",
        b"%00",
    ),
    *(
        b"[::1]:99999",
        b"\0",
        b"&parallel=",
        b"timeout_s=1e999",
        b"\xff",
        b"#",
        b"every=",
        b"0.0000000000001ms",
    ),
)


def _run_words(data: bytes) -> None:
    from holdfast.checkpoint.format import names
    from holdfast.checkpoint.store.address import hide_secrets, parse_address
    from holdfast.checkpoint.store.contract import check_name
    from holdfast.system import units
    from holdfast.watch.compiled.trust import place_of

    text = data.decode("utf-8", "surrogateescape")
    for act in (
        lambda: units.parse_bytes(text, "x"),
        lambda: units.parse_duration(text, "x"),
        lambda: parse_address(text),
        lambda: hide_secrets(text),
        lambda: place_of(text),
        lambda: check_name(text),
        lambda: names.parse(text),
        lambda: names.parse_record("history", text),
    ):
        with contextlib.suppress(*_ours()):
            act()


def _ours() -> tuple[type[BaseException], ...]:
    from holdfast.errors import HoldfastError

    return (HoldfastError,)


def _run_cli(data: bytes) -> None:
    from holdfast import cli

    words = data.decode("utf-8", "surrogateescape").split("\n")
    if words and words[0] in (
        "launch",
        "demo",
        "tune",
        "drain",
        "logs",
        "queue",
        "cancel",
        "preempt",
        "forget",
        "trust",
        "writeback",
        "check",
    ):
        return
    folder = Path(tempfile.mkdtemp(prefix="fuzz-cli-"))
    try:
        out = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            contextlib.suppress(SystemExit),
        ):
            cli.main([word.replace("HOME", str(folder)) for word in words])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_CLI_WORDS = (
    b"--step",
    b"--attempt",
    b"\n",
    b"9" * 400,
    b"-1",
    b"--json",
    b"\n--limit\n",
    b"--step\n-5",
    b"\0",
    b"\xff",
    b"nan",
)


# -- files of other tools ------------------------------------------------------------------------------------


def _run_import(kind: str, name: str, data: bytes) -> None:
    from holdfast.checkpoint.exchange.importer import import_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="fuzz-import-"))
    try:
        if kind in ("dcp", "hf"):
            source = folder / "source"
            shutil.copytree(_folder_seed(kind), source)
            (source / name).write_bytes(data)
        else:
            source = folder / name
            source.write_bytes(data)
        import_checkpoint(source, folder / "home", kind=kind, under="model" if kind == "torch" else None)
        written = sum(path.stat().st_size for path in (folder / "home").rglob("*") if path.is_file())
        given = sum(path.stat().st_size for path in source.parent.rglob("*") if path.is_file()) - written
        assert written < 64 * given + (1 << 20), f"{written} bytes were written of {given}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _folder_seed(kind: str) -> Path:
    import atexit

    import torch

    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    state = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.int64)}
    if kind == "dcp":
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

        # save() of torch 2.6 has no `no_dist`, and warns without a process group.
        _save_state_dict({"model": state, "step": 5}, FileSystemWriter(folder), no_dist=True)
    else:
        from safetensors.torch import save_file

        save_file({"w": state["w"]}, folder / "model-1.safetensors")
        save_file({"b": state["b"]}, folder / "model-2.safetensors")
        index = {"metadata": {}, "weight_map": {"w": "model-1.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _torch_seeds(legacy: bool) -> list[bytes]:
    import torch

    out = []
    w = torch.arange(6.0)
    for value in (
        {"w": w, "n": 3},
        {"a": {"b": w[1:3], "c": w.reshape(2, 3).t()}},
        {"e": torch.ones(1).expand(4)},
    ):
        file = io.BytesIO()
        torch.save(value, file, _use_new_zipfile_serialization=not legacy)
        out.append(file.getvalue())
    return out


def _mutate_torch(data: bytes, chance: random.Random) -> bytes:
    """Change the pickle in an archive (sizes, strides, numbers), write the archive again."""
    import zipfile

    from holdfast.checkpoint.exchange.torch_archive import DAMAGED

    if not chance.randrange(4):
        return mutate_bytes(data, chance)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
    except (*DAMAGED, OSError):
        return mutate_bytes(data, chance)
    out = io.BytesIO()
    with zipfile.ZipFile(
        out, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as archive:
        for name, content in members.items():
            if name.endswith("data.pkl"):
                content = mutate_pickle(content, chance)
            elif not chance.randrange(10):
                content = mutate_bytes(content, chance)
            archive.writestr(name, content)
    return out.getvalue()


_PICKLE_WORDS = (
    *(
        b"K\x02",
        b"M\xff\xff",
        b"J\xff\xff\xff\x7f",
        b"J\xff\xff\xff\xff",
        b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"r\xff\xff\xff\x7f",
    ),
    *(
        b"\x8b\xff\xff\xff\x7f",
        b"B\xff\xff\xff\x7f",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x0f",
        b"N",
        b"(",
        b"t",
        b"]",
        b"}",
        b"R",
        b"\x85",
        b"\x86",
        b".",
    ),
    *(
        b"cos\nsystem\n",
        b"ctorch\nSize\n",
        b"ccollections\nOrderedDict\n",
        b"q\x00",
        b"h\x00",
        b"b",
        b"Q",
        b"s",
        b"u",
        b"e",
        b"a",
        b"0",
        b"2",
        b"j\xff\xff\xff\xff",
    ),
)


def mutate_pickle(data: bytes, chance: random.Random) -> bytes:
    """Return a pickle with opcodes put in or numbers changed."""
    if chance.randrange(2):
        numbers = [i for i in range(len(data) - 1) if data[i : i + 1] == b"K"]
        if numbers:
            at = chance.choice(numbers)
            return data[:at] + chance.choice(_PICKLE_WORDS[:6]) + data[at + 2 :]
    return mutate_text(data, chance, _PICKLE_WORDS)


def _safetensors_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted(_folder_seed("hf").glob("*.safetensors"))]


def _mutate_safetensors(data: bytes, chance: random.Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    if not chance.randrange(8) or size > len(data):
        return mutate_bytes(data, chance)
    head = mutate_json(data[8 : 8 + size].rstrip(), chance)
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def _whole(data: bytes) -> None:
    from holdfast.jobs.writeback import sender

    with tempfile.NamedTemporaryFile(suffix=".safetensors") as out:
        out.write(data)
        out.flush()
        for act in ("_safetensors_truncation", "_zip_truncation"):
            getattr(sender, act)(out.fileno(), len(data))


def _json(*values: Any) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(value).encode() for value in values]


def every() -> dict[str, Target]:
    """Return all targets by name."""
    managed = [
        {
            "job_id": 1,
            "job_name": "x",
            "status": "RUNNING",
            "recovery_count": 1,
            "start_at": 1.5,
            "end_at": None,
        }
    ]
    found = [
        Target("sealed", _named("manifest"), _run_sealed, mutate_sealed),
        Target("manifest", _named("manifest-a0002"), _run_manifest, mutate_sealed),
        Target("part", _named("rank-00000"), _run_part, mutate_sealed),
        Target("catalog", _catalogs, _run_catalog, mutate_json),
        Target("values", _value_seeds, _run_value, mutate_json),
        Target("plain-forms", _value_seeds, _run_plain_forms, mutate_json),
        Target("fitting", _value_seeds, _run_fitting, mutate_json),
        Target("run-documents", _run_documents, _run_run, mutate_sealed),
        Target("history", _history, _run_history, mutate_lines),
        *(
            Target(f"home-{name}", _home_seeds, partial(_run_home, command=name), _mutate_home)
            for name in _COMMANDS
        ),
        Target("history-of-losses", _history, _run_committed, mutate_lines),
        Target("compile-index", _index_seeds, _run_index, mutate_sealed),
        Target("compile-pack", _pack_seeds, _run_pack, mutate_bytes),
        Target("journal", lambda: [_journal_seed()], _run_journal, _mutate_journal),
        Target("keeper-messages", _messages, _run_message, mutate_json),
        *(
            Target(name, lambda make=make: _struct_seeds(make()), partial(_run_record, make), mutate_json)
            for name, make in _records().items()
        ),
        Target("notices", _notice_seeds, _run_notice, mutate_json),
        Target("progress", _json({"home": "/h", "step": 5}), _run_progress, mutate_lines),
        Target(
            "nebula-markers", _json({"home": "/h", "tag": "t", "partition": "p"}), _run_marker, mutate_json
        ),
        Target(
            "slurm-messages",
            _json(
                {
                    "holdfast": "EndedNode",
                    "node": 0,
                    "phase": "run",
                    "code": 1,
                    "killed_by": None,
                    "is_stopped": False,
                },
                {"holdfast": "Here", "node": 1},
            ),
            _run_slurm,
            mutate_json,
        ),
        Target("rank-messages", _rank_messages, _run_rank_message, mutate_json),
        Target("nebula-kinds", _kind_seeds, _run_kinds, mutate_json),
        Target(
            "unsent-files",
            _json({"is_settled": True, "is_hopeless": False, "told": ""}),
            _run_unsent,
            mutate_json,
        ),
        Target("sky-queue", _json(managed), _run_queue, mutate_json),
        Target("task-files", lambda: [_TASK], _run_task, partial(mutate_text, words=_YAML_WORDS)),
        Target("words", lambda: list(_WORDS), _run_words, partial(mutate_text, words=_WORDS)),
        Target(
            "cli-values",
            lambda: [
                b"ls\nHOME",
                b"show\nHOME\n--step\n5",
                b"export\nHOME\nHOME/x.safetensors",
                b"rm\nHOME\n--step\n5\n--yes",
                b"diff\nHOME\nHOME",
            ],
            _run_cli,
            partial(mutate_text, words=_CLI_WORDS),
        ),
        Target(
            "safetensors",
            _safetensors_seeds,
            partial(_run_import, "safetensors", "a.safetensors"),
            _mutate_safetensors,
        ),
        Target("writeback-files", _safetensors_seeds, _whole, _mutate_safetensors),
        Target(
            "hf-index",
            lambda: [(_folder_seed("hf") / "model.safetensors.index.json").read_bytes()],
            partial(_run_import, "hf", "model.safetensors.index.json"),
            mutate_json,
        ),
        Target(
            "dcp-metadata",
            lambda: [(_folder_seed("dcp") / ".metadata").read_bytes()],
            partial(_run_import, "dcp", ".metadata"),
            mutate_pickle,
        ),
        Target(
            "dcp-items",
            lambda: [(_folder_seed("dcp") / "__0_0.distcp").read_bytes()],
            partial(_run_import, "dcp", "__0_0.distcp"),
            mutate_bytes,
        ),
        Target(
            "torch-archive",
            partial(_torch_seeds, legacy=False),
            partial(_run_import, "torch", "a.pt"),
            _mutate_torch,
        ),
        Target(
            "torch-legacy",
            partial(_torch_seeds, legacy=True),
            partial(_run_import, "torch", "a.pt"),
            mutate_pickle,
        ),
    ]
    return {target.name: target for target in found}
