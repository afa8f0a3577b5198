"""Compiled code that one machine uploads and another downloads, within the size limit, without a compiler."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from faulty_store import FaultyStore
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.watch import SharedPlace
from holdfast.errors import RetryLater
from holdfast.watch.compiled import transfer
from holdfast.watch.compiled.directory import Directory, current_environment, environment_key
from holdfast.watch.compiled.trainer import CompileCache
from holdfast.watch.compiled.transfer import (
    FOLDER,
    CacheUploader,
    IndexName,
    PackName,
    load,
    parse,
    parse_name,
)
from stage import ranks
from stage.training import make_checkpointer

KEY = "0123456789abcdef" * 2
FACTS = {"cpu": "flags: avx2"}


def fill(folder: Path, *names: str, size: int = 100) -> Directory:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(hash_bytes(name, size)))
    return Directory(folder)


def hash_bytes(name: str, size: int) -> bytes:
    """Bytes that no compression makes smaller."""
    import random

    return random.Random(name).randbytes(size)


def uploader(store: Store, attempt: int = 1, rank: int = 0, **options: Any) -> CacheUploader:
    options = {"limit_bytes": 1 << 30, **options}
    return CacheUploader(store, KEY, FACTS, attempt=attempt, rank=rank, **options)


def upload_new(one: CacheUploader, directory: Directory, *, is_last: bool = False) -> transfer.UploadResult:
    return one.upload(directory, is_last=is_last, is_ended=lambda: False)


def arrive(store: Store, folder: Path) -> dict[str, bytes]:
    """What a new machine gets."""
    load(store, KEY, FACTS, Directory(folder), limit_s=600)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kinds(store: Store) -> tuple[int, int]:
    """How many indices and packs there are."""
    told = [parse_name(entry.name) for entry in store.list(FOLDER)]
    return sum(isinstance(one, IndexName) for one in told), sum(isinstance(one, PackName) for one in told)


class Run:
    """Parts of a run that the watch uses, with what it has shown and noted."""

    def __init__(self, store: Store, home: Path) -> None:
        self.store, self.home, self.rank = store, str(home), 0
        self.warnings, self.lines = list[str](), list[str]()
        self.warn, self.show, self.notes = self.warnings.append, self.lines.append, queue.SimpleQueue[str]()

    def note(self, event: str, **_: object) -> None:
        self.notes.put(event)


def begin(run: Run, *, trust: bool | None = None) -> Any:
    """The watch of a run that has been claimed."""
    cache: Any = CompileCache(trust=trust)
    cache.begin(run)
    cache.claimed(1, SharedPlace(is_first=True, turn=0))
    return cache


@pytest.fixture
def home(tmp_path: Path) -> Store:
    return open_store(tmp_path / "home")


def test_only_new_files_are_uploaded_and_all_are_downloaded(home: Store, tmp_path: Path):
    directory, one = fill(tmp_path / "here", "ab/x.so", "fxgraph/k/v"), uploader(home)
    assert upload_new(one, directory).num_files == 2
    assert upload_new(one, directory).num_files == 0
    fill(tmp_path / "here", "ab/y.so")
    assert upload_new(one, directory).num_files == 1
    assert kinds(home) == (1, 2)
    assert set(arrive(home, tmp_path / "there")) == {"ab/x.so", "ab/y.so", "fxgraph/k/v"}
    assert arrive(home, tmp_path / "there")["ab/x.so"] == (tmp_path / "here" / "ab" / "x.so").read_bytes()


def test_an_attempt_that_downloaded_everything_uploads_nothing(home: Store, tmp_path: Path):
    upload_new(uploader(home), fill(tmp_path / "here", "a"))
    assert upload_new(uploader(home, 2), fill(tmp_path / "here")).num_files == 0
    fill(tmp_path / "here", "b")
    assert upload_new(uploader(home, 3), Directory(tmp_path / "here")).num_files == 1
    assert set(arrive(home, tmp_path / "there")) == {"a", "b"}


def test_large_caches_are_uploaded_in_packs_that_count_separately(
    home: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfer, "PACK_BYTES", 250)
    directory = fill(tmp_path / "here", *(f"f{i}" for i in range(7)))
    faulty = FaultyStore(home)
    faulty.fail("put", RetryLater("the network has gone"), matching=".pack", nth=3)
    one = uploader(faulty)
    with pytest.raises(RetryLater):
        upload_new(one, directory)
    assert len(arrive(home, tmp_path / "there")) == 4
    assert upload_new(one, directory).num_files == 3
    assert len(arrive(home, tmp_path / "there")) == 7
    assert kinds(home) == (1, 4)


def test_files_that_could_not_be_downloaded_are_uploaded_again(home: Store, tmp_path: Path):
    directory = fill(tmp_path / "here", "a", "b")
    upload_new(uploader(home), directory)
    (pack,) = (tmp_path / "home" / "compiled" / KEY).glob("*.pack")
    pack.unlink()
    loaded = load(home, KEY, FACTS, Directory(tmp_path / "there"), limit_s=600)
    assert loaded.lacking == {"a", "b"}
    assert len(loaded.problems) == 1
    assert upload_new(uploader(home, 2, lacking=loaded.lacking), directory).num_files == 2
    assert set(arrive(home, tmp_path / "other")) == {"a", "b"}


def test_an_older_copy_replaces_a_damaged_newer_one(home: Store, tmp_path: Path):
    directory = fill(tmp_path / "here", "a")
    upload_new(uploader(home, 1), directory)
    upload_new(uploader(home, 2, lacking={"a"}), directory)
    (newer,) = (tmp_path / "home" / "compiled" / KEY).glob("a0002-*.pack")
    newer.write_bytes(b"x" * newer.stat().st_size)
    loaded = load(home, KEY, FACTS, Directory(tmp_path / "there"), limit_s=600)
    assert (loaded.there, loaded.lacking) == ({"a"}, set())
    assert "damaged" in loaded.problems[0]


def test_an_index_of_another_environment_is_skipped(home: Store, tmp_path: Path):
    CacheUploader(home, KEY, {"cpu": "another"}, attempt=1, rank=0, limit_bytes=1 << 20).upload(
        fill(tmp_path / "here", "a"), is_ended=lambda: False
    )
    loaded = load(home, KEY, FACTS, Directory(tmp_path / "there"), limit_s=600)
    assert loaded.there == set()
    assert "differs in cpu" in loaded.problems[0]


def test_the_oldest_files_are_deleted_and_files_over_the_limit_stay_local(home: Store, tmp_path: Path):
    limit_bytes = 3000
    for attempt in (1, 2, 3):
        directory = fill(tmp_path / str(attempt), f"file-{attempt}", size=1000)
        assert upload_new(uploader(home, attempt, limit_bytes=limit_bytes), directory).problem is None
        assert sum(entry.num_bytes for entry in home.list(FOLDER)) <= limit_bytes
    assert set(arrive(home, tmp_path / "there")) == {"file-2", "file-3"}
    sent = upload_new(uploader(home, 4, limit_bytes=limit_bytes), fill(tmp_path / "4", "large", size=5000))
    assert sent.problem is not None
    assert "their limit of 3.0 kB" in sent.problem
    assert sent.num_files == 0


def test_only_the_first_uploader_deletes_old_files(home: Store, tmp_path: Path):
    upload_new(uploader(home, 1), fill(tmp_path / "1", "old", size=1000))
    home.put(f"compiled/{KEY}/a0001-{KEY}.pack", b"x")
    home.put(f"compiled/{KEY[::-1]}/a0001-{KEY}.pack", b"nothing lists it")
    second = uploader(home, 2, 8, limit_bytes=2000, turn=1)
    assert upload_new(second, fill(tmp_path / "8", "new-8", size=1000), is_last=True).problem
    assert kinds(home) == (1, 3)
    assert (
        upload_new(uploader(home, 2, 0, limit_bytes=2000), fill(tmp_path / "0", "new-0", size=1000)).num_files
        == 1
    )
    assert kinds(home) == (1, 1)
    assert set(arrive(home, tmp_path / "there")) == {"new-0"}


def test_other_hosts_wait_for_the_first_and_upload_the_remaining_files(home: Store, tmp_path: Path):
    first, second = uploader(home, 1, 0), uploader(home, 1, 8, turn=1)
    here, there = fill(tmp_path / "0", "a", "b"), fill(tmp_path / "8", "a", "b", "c")
    assert upload_new(second, there).num_files == 0
    assert upload_new(first, here).num_files == 2
    assert upload_new(second, there).num_files == 1
    assert kinds(home) == (2, 2)
    assert set(arrive(home, tmp_path / "there")) == {"a", "b", "c"}


def test_a_failing_store_is_only_a_problem_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import torch._inductor.codecache  # noqa: F401 - else nothing was compiled, and nothing is tried

    fill(tmp_path / "here", "a")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    store = FaultyStore(open_store(tmp_path / "home"))
    store.fail("list", RetryLater("no network"), times=None)
    run = Run(store, tmp_path / "home")
    cache = begin(run, trust=True)
    cache.prepare()
    cache.saved(None)
    cache.end(None)
    read, sent = run.warnings
    assert "Cannot read the compile cache" in read
    assert "Cannot upload compiled code" in sent


def test_closing_does_not_wait_for_a_store_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import torch._inductor.codecache  # noqa: F401

    fill(tmp_path / "here", "a")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    store = FaultyStore(open_store(tmp_path / "home"))
    gate = store.hold("put", matching=".pack")
    cache = begin(Run(store, tmp_path / "home"), trust=False)
    cache.saved(None)
    assert gate.reached.wait(600)
    cache.end(0.01)
    gate.opened.set()
    for thread in threading.enumerate():
        if thread.name == "holdfast-compiled":
            thread.join(600)
            assert not thread.is_alive()


def test_code_that_is_compiled_after_a_rollback_belongs_to_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.codecache  # noqa: F401

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    run = Run(open_store(tmp_path / "home"), tmp_path / "home")
    cache = begin(run, trust=False)
    for attempt, file in ((1, "a"), (2, "b")):
        fill(tmp_path / "here", file)
        cache.claimed(attempt, SharedPlace(is_first=True, turn=0))
        cache.saved(None)
        assert run.notes.get(timeout=600) == "compiled-sent"
    cache.end(None)
    names = (parse_name(entry.name) for entry in run.store.list(FOLDER))
    assert 2 in {name.attempt for name in names if isinstance(name, IndexName)}


def test_an_untrusted_home_leads_to_one_message_and_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "there"))
    store, facts = open_store(tmp_path / "home"), current_environment()
    CacheUploader(store, environment_key(facts), facts, attempt=1, rank=0, limit_bytes=1 << 20).upload(
        fill(tmp_path / "here", "a"), is_ended=lambda: False
    )
    run = Run(store, tmp_path / "home")
    asks = begin(run)
    asks.prepare()
    asks.prepare()
    begin(run, trust=False).prepare()
    assert [f"holdfast trust {run.home}" in line for line in run.lines] == [True]
    assert not (tmp_path / "there").exists()
    monkeypatch.setenv("HOLDFAST_TRUST_HOMES", str(tmp_path))
    begin(run).prepare()
    assert "compiled code from" in run.lines[-1]
    assert run.notes.get_nowait() == "compiled-loaded"
    assert run.warnings == []
    assert (tmp_path / "there" / "a").read_bytes() == (tmp_path / "here" / "a").read_bytes()


def train_on_a_host(rank: int, home: Path, folder: Path) -> set[str]:
    """Train a step as if each rank were a host of its own that compiles. Return the code that it receives."""
    import torch._inductor.codecache  # as if something had been compiled

    folder.mkdir(exist_ok=True)
    here = folder / f"host-{rank}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(here)
    with make_checkpointer(home, {"x": torch.zeros(3)}, watches=[CompileCache(trust=True)]) as ckpt:
        step = ckpt.restore() or 0
        received = {path.name for path in here.glob("*")}
        fill(here, f"made-{rank}-{step}", f"common-{step}")
        ckpt.save(step + 1)
    return received


@pytest.mark.ranks
def test_each_host_receives_the_code_that_any_host_compiled(tmp_path: Path) -> None:
    assert ranks.run_ranks(2, train_on_a_host, tmp_path / "home", tmp_path / "first") == [set(), set()]
    store = open_store(tmp_path / "home")
    names = [entry.name for entry in store.list(FOLDER)]
    indices = [parse(store.get(name), name) for name in names if isinstance(parse_name(name), IndexName)]
    assert {index.rank for index in indices} == {0, 1}
    made = {"made-0-0", "made-1-0", "common-0"}
    assert {file.path for index in indices for file in index.files} == made
    second = ranks.run_ranks(2, train_on_a_host, tmp_path / "home", tmp_path / "second")
    assert second == [made, made]
