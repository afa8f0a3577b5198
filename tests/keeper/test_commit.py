"""Commit, history and protocol: many keepers, one manifest; what does not fit is refused."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from faulty_store import FaultyStore
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.layout import Shard, lay_out, whole
from holdfast.checkpoint.format.manifest import merge, parse
from holdfast.checkpoint.home.commit import commit, is_committed
from holdfast.checkpoint.home.history import EVENTS, History
from holdfast.checkpoint.home.listing import missing_ranks
from holdfast.checkpoint.keeper import ArenaLayout, Keeper, KeeperConfig, Save, packets
from holdfast.checkpoint.keeper.messages import Configure, RecordEvent, SaveDelayed, encode
from holdfast.checkpoint.keeper.messages import parse as parse_message
from holdfast.checkpoint.keeper.persist import persist
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.stage import Arena
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Conflict, Corrupt, HoldfastError, InvalidInput, RetryLater
from making import flip
from stage.training import wait_until


def make_config(home: str, rank: int = 0, world_size: int = 2, commit_timeout_s: float = 600) -> KeeperConfig:
    return KeeperConfig(home, "run", 1, rank, world_size, True, Keep(3), commit_timeout_s, 1.0, retry_s=0.01)


def make_image(rank: int, dtype: str = "F32", name: str | None = None) -> tuple[bytes, bytes]:
    """File image and catalog of a rank that writes one tensor."""
    tensor = Tensor(dtype, (64,), whole(rank), (rank,))
    name = name or f"t{rank}"
    layout = lay_out([Shard.whole(name, dtype, (64,))], rank)
    image = layout.header.ljust(layout.file_bytes, b"\x01")
    return image, catalog_text(Catalog({name: tensor}, {}))


def make_draft(
    rank: int, catalog: bytes, *, step: int = 5, starts: tuple[int, ...] = (4096,), **more: Any
) -> bytes:
    given = {"attempt": 1, "world_size": 2, "ancestors": (), **more}
    facts = parts.PartFacts("run", step, rank=rank, values={}, own=(), **given)
    return parts.draft(facts, starts, catalog)


def put_part(store: Store, rank: int, *, world_size: int = 2) -> None:
    image, catalog = make_image(rank)
    file = persist(store, names.data(5, 1, rank), memoryview(image))
    store.put(names.part(5, 1, rank), parts.finish(make_draft(rank, catalog, world_size=world_size), file))


def test_a_slow_read_of_a_part_does_not_hold_up_the_next_ones_and_the_manifest_has_all_in_order() -> None:
    store = FaultyStore(MemoryStore())
    store.properties = replace(store.properties, survives_host=True)
    for rank in range(20):
        put_part(store, rank, world_size=20)
    gate = store.hold("get", matching=names.part(5, 1, 0))
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(commit, store, make_config("", 0, 20).writer, 5)
        try:
            wait_until(lambda: any(call.name == names.part(5, 1, 7) for call in store.calls("get")), 60)
        finally:
            gate.opened.set()
        assert [file.rank for file in made.result().parts] == list(range(20))
    read = [call.name for call in store.calls("get") if call.name.endswith("-a0001.json")]
    assert sorted(read) == [names.part(5, 1, rank) for rank in range(20)]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_commit_reads_a_catalog_once_for_all_ranks_that_have_it(*, is_damaged: bool) -> None:
    """Ranks 0 to 2 and 3 to 5 are two stages. Damage outside of a catalog is found."""
    store, written = FaultyStore(MemoryStore()), list[parts.Part]()
    for rank in range(6):
        first, name = rank // 3 * 3, "w" * (1 + rank // 3)
        tensor = Tensor("F32", (64,), whole(first), (first, first + 1, first + 2))
        layout = lay_out([Shard.whole(name, "F32", (64,))] if rank == first else [], rank)
        file = persist(store, names.data(5, 1, rank), memoryview(bytes(layout.file_bytes)))
        catalog = catalog_text(Catalog({name: tensor}, {}))
        document = parts.finish(
            make_draft(rank, catalog, world_size=6, starts=(4096,) if rank == first else ()), file
        )
        written.append(parts.parse(document, "part"))
        store.put(names.part(5, 1, rank), document)
    if is_damaged:
        flip(store.inner, names.part(5, 1, 4), 100)
        with pytest.raises(Corrupt, match=r"rank-00004-a0001\.json does not match its own seal"):
            commit(store, make_config("", 0, 6).writer, 5)
        return
    made = commit(store, make_config("", 0, 6).writer, 5)
    assert replace(made, id="", created_unix_s=0.0) == merge(written, id="", created_unix_s=0.0)
    whole_ones = [call.name for call in store.calls("get") if "rank-" in call.name]
    assert whole_ones == [names.part(5, 1, rank) for rank in (0, 3)]


def test_eight_commits_at_once_write_one_manifest(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "home"))
    for rank in range(8):
        put_part(store, rank, world_size=8)
    start = threading.Barrier(8)

    def run(rank: int) -> None:
        start.wait()
        commit(open_store(str(tmp_path / "home")), make_config("", rank, 8).writer, 5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    found = [entry.name for entry in store.list("step-") if "manifest" in entry.name]
    assert found == [names.manifest(5, 1)]
    manifest = parse(store.get(found[0]), found[0])
    assert sorted(manifest.tensors) == [f"t{rank}" for rank in range(8)]
    assert is_committed(store, make_config("", 3, 8).writer, 5)


def test_a_concurrent_commit_of_the_same_save_is_accepted() -> None:
    """It is stopped between check and write while another rank writes the manifest."""
    store = FaultyStore(MemoryStore())
    put_part(store, 0)
    put_part(store, 1)
    gate = store.hold("put", matching="manifest")
    first = threading.Thread(target=commit, args=(store, make_config("", 0).writer, 5))
    first.start()
    assert gate.reached.wait(600)
    commit(store, make_config("", 1).writer, 5)
    before = store.get(names.manifest(5, 1))
    gate.opened.set()
    first.join()
    assert store.get(names.manifest(5, 1)) == before


def test_a_fenced_attempt_commits_nothing() -> None:
    store = MemoryStore()
    put_part(store, 0)
    put_part(store, 1)
    store.put(names.attempt(2), b"{}")
    with pytest.raises(Conflict, match="Attempt 2 has taken over"):
        commit(store, make_config("").writer, 5)
    assert not is_committed(store, make_config("").writer, 5)


def test_missing_ranks_counts_only_parts_of_this_attempt_and_step() -> None:
    store = MemoryStore()
    put_part(store, 1)
    store.put(names.part(5, 2, 0), b"")
    store.put(names.data(5, 1, 0), b"")
    store.put(names.part(6, 1, 0), b"")
    assert missing_ranks(store, make_config("").writer, 5) == [0]


def submit(keeper: Keeper, rank: int, *, dtype: str = "F32", name: str | None = None, step: int = 5) -> Save:
    """Submit one save to a keeper, as a rank would."""
    image, catalog = make_image(rank, dtype, name)
    return submit_images(keeper, step, make_draft(rank, catalog, step=step), image)


def submit_images(
    keeper: Keeper, step: int, draft: bytes, first: bytes, second: bytes = b"", *, is_unchanged: bool = False
) -> Save:
    """Submit one or two images of a save, the second on the next whole page of the arena."""
    at = -(-len(first) // 4096) * 4096
    arena = Arena(step, at + len(second))
    for start, image in ((0, first), *([(at, second)] if second else [])):
        arena.bytes[start : start + len(image)].copy_(torch.frombuffer(bytearray(image), dtype=torch.uint8))
    layout = ArenaLayout(len(first), at, len(second), is_unchanged) if second else ArenaLayout(len(first))
    save = Save(step)
    keeper.submit(save, arena=step, arena_fd=arena.fd, arenas=[step], layout=layout, draft=draft)
    return save


def test_two_keepers_make_one_checkpoint_and_both_saves_are_durable(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    keepers = [Keeper(make_config(home, rank), released=lambda _: None) for rank in (0, 1)]
    saves = [[submit(keeper, rank, step=step) for rank, keeper in enumerate(keepers)] for step in (5, 6, 7)]
    for of_step in saves:
        for save in of_step:
            save.wait_durable(600)
    for keeper in keepers:
        keeper.close()
    found = sorted(path.name for path in (tmp_path / "home").glob("step-*/manifest*"))
    assert found == ["manifest-a0001.json"] * 3


def test_a_missing_rank_is_named_and_later_saves_succeed(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    configs = make_config(home, 0, commit_timeout_s=0.2), make_config(home, 1)
    keepers = [Keeper(config, released=lambda _: None) for config in configs]
    lonely = submit(keepers[0], 0)
    with pytest.raises(RetryLater, match=r"the parts of ranks \[1\] did not arrive"):
        lonely.wait_durable(600)
    assert lonely.failed is not None
    saves = [submit(keepers[1], 1, step=9)]
    wait_until((tmp_path / "home" / names.part(9, 1, 1)).exists)  # rank 0 waits for it 0.2 s at most
    saves.append(submit(keepers[0], 0, step=9))
    for save in saves:
        save.wait_durable(600)
    for keeper in keepers:
        keeper.close()
    assert [path.parent.name for path in (tmp_path / "home").glob("step-*/manifest*")] == ["step-00000009"]


def test_ranks_with_conflicting_tensors_commit_nothing_and_all_raise_the_reason(tmp_path: Path) -> None:
    """Rank 0, which commits, and the other one raise the same reason, long before the timeout."""
    home = str(tmp_path / "home")
    keepers = [
        Keeper(make_config(home, rank, commit_timeout_s=600.0), released=lambda _: None) for rank in (0, 1)
    ]
    saves = [submit(keepers[0], 0, name="w"), submit(keepers[1], 1, name="w", dtype="BF16")]
    for save in saves:
        with pytest.raises(InvalidInput, match="Ranks disagree about w"):
            save.wait_durable(600)
    for keeper in keepers:
        keeper.close()
    assert not list((tmp_path / "home").glob("step-*/manifest*"))


def test_a_keeper_exits_if_its_save_will_never_be_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts exist, but rank 0's keeper is dead: the other one does not wait for the timeout."""
    home = str(tmp_path / "home")
    monkeypatch.setenv("HOLDFAST_KILL_AT", "keeper.part:1")
    first = Keeper(make_config(home, 0), released=lambda _: None)
    with pytest.raises(HoldfastError):  # every keeper in its place dies at the same point
        submit(first, 0).wait_durable(600)
    monkeypatch.delenv("HOLDFAST_KILL_AT")
    assert list((tmp_path / "home").glob("step-*/rank-00000-*.json"))
    config = replace(make_config(home, 1, commit_timeout_s=900.0), linger_s=900.0)
    second = Keeper(config, released=lambda _: None)
    save = submit(second, 1)
    second.close(timeout_s=600.0)
    with pytest.raises(RetryLater, match="rank 0's commit did not arrive"):
        save.wait_durable(600)
    first.close(timeout_s=1.0)
    store = open_store(home)
    assert missing_ranks(store, config.writer, 5) == [], "the next attempt can commit it"


def test_a_save_fails_if_its_keeper_exits_without_a_report(tmp_path: Path) -> None:
    """It is closed while the other rank's part is missing, and killed before it can report."""
    keeper = Keeper(make_config(str(tmp_path / "home")), released=lambda _: None)
    save = submit(keeper, 0)
    keeper.close(timeout_s=0.0)
    os.kill(keeper.pid, signal.SIGKILL)
    with pytest.raises(RetryLater, match=r"had not reported the outcome|did not arrive"):
        save.wait_durable(600)


def test_a_blocked_standard_error_does_not_hold_up_saves(tmp_path: Path) -> None:
    """As of a program whose output is piped to one that was stopped."""
    is_logging, may_continue = threading.Event(), threading.Event()

    class Blocked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_logging.set()
            assert may_continue.wait(600)

    keeper = Keeper(make_config(str(tmp_path / "home")), released=lambda _: None)
    save, handler, logger = submit(keeper, 0), Blocked(), logging.getLogger("holdfast.checkpoint.keeper")
    logger.addHandler(handler)
    try:
        threading.Thread(target=keeper._receive, args=[SaveDelayed(5, "It waits.")]).start()
        assert is_logging.wait(600)
        deletion = threading.Thread(target=keeper.delete, args=[1], daemon=True)
        deletion.start()
        deletion.join(10)
        assert not deletion.is_alive()
    finally:
        may_continue.set()
        logger.removeHandler(handler)
    keeper.close(timeout_s=0.0)
    os.kill(keeper.pid, signal.SIGKILL)
    with pytest.raises(RetryLater):
        save.wait_durable(600)


# -- history and protocol ------------------------------------------------------------------------------------


def test_the_history_of_a_run_has_every_event(tmp_path: Path) -> None:
    """Two attempts of one run: staged, persisted, committed, retained, restored."""
    from stage.training import make_checkpointer

    state = {"x": torch.ones(3)}
    with make_checkpointer(tmp_path / "home", state, keep=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).wait_durable()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        assert list(ckpt.steps(3)) == []
    lines = []
    for path in sorted((tmp_path / "home" / "history").iterdir()):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    told = [(line["attempt"], line["event"], line["step"]) for line in lines]
    for step in (1, 2, 3):
        for event in ("staged", "persisted", "committed"):
            assert told.count((1, event, step)) == 1, (event, step)
    assert [one for one in told if one[1] == "retained"] == [(1, "retained", 1), (1, "retained", 2)]
    assert told[-2:] == [(2, "restored", 3), (2, "ended", 3)]
    for line in lines:
        assert set(line) == {"t", "event", "step", "attempt", "rank", "bytes", "seconds", "detail", "tier"}
        assert line["event"] in EVENTS
        assert line["bytes"] > 0 or line["event"] in ("retained", "tear-check", "ended")


def test_a_history_that_cannot_be_written_is_reported_and_stops_nothing() -> None:
    store = FaultyStore(MemoryStore())
    history = History(store, make_config("").writer)
    store.fail("append", InvalidInput("a directory is in the way"))
    history.record("staged", step=1)
    assert history.trouble == "a directory is in the way"
    history.record("staged", step=2)
    assert b'"step":2' in store.get(names.history(1, 0))


texts = st.text(st.characters(), max_size=5)


@given(
    st.dictionaries(
        texts.map("x-{}".format),
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts | st.lists(texts, max_size=3),
    ),
    texts,
)
def test_messages_arrive_as_they_were_sent(members: dict[str, object], detail: str) -> None:
    message = RecordEvent("metrics", 1, 2.5, detail=detail, members=members)
    ours, theirs = packets.make_pair()
    with ours, theirs:
        packets.send(ours, message)
        assert packets.receive(theirs) == (message, [])


def test_the_longest_detail_fits_into_a_packet(tmp_path: Path) -> None:
    """An error text of characters that JSON writes with twelve bytes each must not break the connection."""
    keeper = Keeper(make_config(str(tmp_path / "home"), world_size=1), released=lambda _: None)
    keeper.record("failed", step=1, detail="\U0001f30a" * 20_000)
    keeper.record("failed", step=2, detail="short")
    keeper.close()
    lines = (tmp_path / "home" / names.history(1, 0)).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@given(st.integers(0, 5), st.one_of(st.none(), st.integers(1, 5)), texts)
def test_a_configuration_round_trips(rank: int, keep_last: int | None, home: str) -> None:
    config = KeeperConfig(home, "run", 1, rank, 6, False, Keep(keep_last), 1.5, 2.0)
    assert parse_message(encode(Configure(config))) == Configure(config)
