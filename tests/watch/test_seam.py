"""The seam of the watches: what they receive, what happens when they fail, and their sections of parts."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typing_extensions import override

import holdfast
from faulty_store import FaultyStore
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.layout import Shard, lay_out, whole
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.home.metrics import SaveValues, read_metrics
from holdfast.checkpoint.keeper.components import KeeperComponents
from holdfast.checkpoint.keeper.config import WatchConfig
from holdfast.checkpoint.keeper.inbox import StagedSave
from holdfast.checkpoint.keeper.lockfile import KeeperInfo
from holdfast.checkpoint.keeper.messages import ArenaLayout, SubmitSave
from holdfast.checkpoint.keeper.save_files import SaveFiles
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatches
from holdfast.checkpoint.run.watching import choose_watches
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.watch import CopiedSave, WatchedRun
from holdfast.errors import Corrupt, RetryLater
from holdfast.watch.values import ValuesKeeper
from keeper.test_commit import make_config
from making import history_lines, make_home, make_reports, raw_bytes
from stage.training import make_checkpointer


class Toy(holdfast.Watch):
    """Watch that notes each event, and may fail in one."""

    name: ClassVar[str] = "toy"

    def __init__(self, *, fails: str = "", seen: list[Any] | None = None) -> None:
        self.fails, self.seen = fails, [] if seen is None else seen

    def note(self, event: str, *arguments: Any) -> None:
        self.seen.append((event, *arguments))
        if self.fails == event:
            raise ValueError(f"cannot {event}")

    @override
    def applies(self, run: WatchedRun) -> bool:
        self.note("applies")
        return True

    @override
    def begin(self, run: WatchedRun) -> None:
        self.note("begin", run.rank, run.world_size)

    @override
    def step(self, step: int) -> None:
        self.note("step", step)

    @override
    def end(self, timeout_s: float | None) -> None:
        self.note("end")


class ToyWithKeeper(holdfast.Watch):
    """Watch with a half in the keeper."""

    name: ClassVar[str] = "toy-with-keeper"
    keeper: ClassVar[str | None] = "watch.toy_keeper:ToyKeeper"

    def __init__(self, file: Path, *, fails: bool = False) -> None:
        self.file, self.fails = file, fails

    @override
    def options(self) -> dict[str, Any]:
        return {"file": str(self.file), "fails": self.fails}


def train(home: Path, *watches: holdfast.Watch, steps: int = 3) -> None:
    state = {"weights": torch.zeros(3)}
    with holdfast.Checkpointer(home, state, every=1, watches=watches, quiet=True) as ckpt:
        for _ in ckpt.steps(steps):
            state["weights"].add_(1)


def odd(*, name: str = "odd", keeper: str | None = None) -> holdfast.Watch:
    return type("Odd", (holdfast.Watch,), {"name": name, "keeper": keeper})()


def test_a_given_watch_replaces_the_default_of_its_name() -> None:
    names = [watch.name for watch in holdfast.default_watches()]
    off = holdfast.Hang("off")
    chosen = choose_watches([off, Toy()])
    assert [watch.name for watch in chosen] == [*names, "toy"]
    assert off in chosen
    assert choose_watches(None) == ()
    assert [watch.name for watch in choose_watches(())] == names


@pytest.mark.parametrize(
    ("watches", "message"),
    [
        ([holdfast.Hang(), holdfast.Hang("off")], "two watches with the name 'hang'"),
        (["hang"], r"objects such as holdfast.Hang\(\), got 'hang'"),
        ([odd(name="Odd name")], "got 'Odd name'"),
        ([holdfast.Watch()], "got ''. Set it in the class"),
        ([odd(keeper="__main__:Half")], "cannot import '__main__"),
        ([odd(keeper="no_such_module:Half")], "cannot import 'no_such_module"),
    ],
)
def test_watches_that_cannot_be_used_are_refused(tmp_path: Path, watches: Any, message: str) -> None:
    with pytest.raises(holdfast.InvalidInput, match=message):
        holdfast.Checkpointer(tmp_path / "run", {}, watches=watches)


def test_a_watch_receives_the_events_in_order(tmp_path: Path) -> None:
    toy = Toy()
    train(tmp_path / "run", toy)
    steps = [("step", 1), ("step", 2), ("step", 3)]
    assert toy.seen == [("applies",), ("begin", 0, 1), *steps, ("end",)]


@pytest.mark.parametrize(
    ("event", "seen"),
    [
        ("applies", ["applies"]),
        ("begin", ["applies", "begin"]),
        ("step", ["applies", "begin", "step"]),
        ("end", ["applies", "begin", "step", "step", "step", "end"]),
    ],
)
def test_an_error_in_a_watch_switches_only_that_watch_off(
    tmp_path: Path, event: str, seen: list[str]
) -> None:
    home, toy = tmp_path / "run", Toy(fails=event)
    with pytest.warns(
        holdfast.WatchWarning, match=rf"'toy' has failed in {event}\(\).*cannot {event}"
    ) as found:
        train(home, toy)
    assert len(found) == 1
    assert [name for name, *_ in toy.seen] == seen
    assert holdfast.open(home).step == 3
    if event != "end":
        (line,) = history_lines(home, "watch-off")
        assert "'toy'" in line["detail"]


def test_one_object_may_watch_several_runs(tmp_path: Path) -> None:
    hang = holdfast.Hang(limit="5m")
    for name in ("one", "two"):
        train(tmp_path / name, hang)
    assert hang == holdfast.Hang(limit="5m")


def test_the_half_in_the_keeper_receives_its_options(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "seen"
    train(tmp_path / "run", ToyWithKeeper(file))
    name, pid = json.loads(file.read_text())
    assert (name, pid != os.getpid()) == ("toy-with-keeper", True)
    assert "the toy has started" in capfd.readouterr().err


def test_a_half_that_fails_in_the_keeper_fails_no_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "run"
    train(home, ToyWithKeeper(tmp_path / "seen", fails=True))
    assert holdfast.open(home).step == 3
    assert "'toy-with-keeper' has failed in the keeper of rank 0" in capfd.readouterr().err
    assert "cannot start" in history_lines(home, "watch-off")[0]["detail"]


class Talking(holdfast.Watch):
    """Watch that shows and records a text."""

    name: ClassVar[str] = "talking"

    @override
    def begin(self, run: WatchedRun) -> None:
        run.warn("the run is watched")
        run.note("spike", step=None, detail=f"watched at {run.home}")


def test_a_watch_can_warn_and_write_into_the_history(tmp_path: Path) -> None:
    home = tmp_path / "run"
    with pytest.warns(holdfast.WatchWarning, match="the run is watched"):
        train(home, Talking())
    (line,) = history_lines(home, "spike")
    assert line["detail"] == f"watched at {home}"


def test_a_half_that_kills_the_keeper_is_left_out_after_two_deaths(tmp_path: Path) -> None:
    watch = odd(name="dying", keeper="watch.toy_keeper:DyingKeeper")
    with pytest.warns(holdfast.SaveWarning) as warned:
        train(tmp_path / "home", watch)
    assert holdfast.open(tmp_path / "home").step == 3
    assert "has died 2 times in a row. The next one works without the halves of these watches: dying" in str(
        [str(one.message) for one in warned]
    )


def test_a_half_that_ends_the_keeper_after_the_close_loses_no_value(tmp_path: Path) -> None:
    watch = odd(name="leaving", keeper="watch.toy_keeper:LeavingKeeper")
    ckpt = make_checkpointer(tmp_path, {"w": torch.zeros(4)}, watches=[watch])
    ckpt.save(1).wait_durable()
    ckpt.record(1, loss=1.0)
    with pytest.warns(holdfast.SaveWarning) as warned:
        ckpt.close()
    assert "died (exit status 1)" in str(warned[0].message)
    assert read_metrics(open_store(tmp_path), CheckpointId(attempt=1, step=1)) == {"loss": 1.0}


def test_more_watches_than_a_checkpoint_has_room_for_are_refused() -> None:
    with pytest.raises(holdfast.InvalidInput, match="at most 32 watches"):
        choose_watches([odd(name=f"odd-{number}") for number in range(32)])


FAILED = RetryLater("no answer")


def staged(step: int, values: torch.Tensor) -> tuple[StagedSave, memoryview]:
    """A save of one tensor, and its arena."""
    layout = lay_out([Shard.whole("w", "F32", tuple(values.shape))], 0)
    image = bytearray(layout.file_bytes)
    image[: len(layout.header)] = layout.header
    raw = raw_bytes(values)
    image[layout.starts[0] : layout.starts[0] + len(raw)] = raw
    catalog = Catalog({"w": Tensor("F32", tuple(values.shape), whole(0), (0,))}, {})
    facts = parts.PartFacts("run", step, 1, rank=0, world_size=1, ancestors=(), values={}, own=())
    draft = parts.draft(facts, layout.starts, catalog_text(catalog))
    draft_fd = os.memfd_create("draft")
    os.write(draft_fd, draft)
    request = SubmitSave(step, 0, (), ArenaLayout(len(image)), to_home=True)
    return StagedSave(request, -1, draft_fd, 0.0), memoryview(image)


def test_a_step_that_is_saved_again_has_the_sections_of_its_own_bytes() -> None:
    """The first save of the step was given up after its sections were made: the store lost its part."""
    store, config = FaultyStore(MemoryStore()), make_config("home", world_size=1)
    make_home(store)
    half = WatchConfig("finite-values", "holdfast.watch.values:ValuesKeeper", "", {})
    inbox, reports = make_reports(store, config)
    trainer = KeeperInfo(1, 0, os.getpid(), 0, busy=False)
    watches = KeeperWatches(
        (half,),
        lambda name: KeeperRun(name, config, trainer, reports.history, lambda: False, inbox),
        lambda _: {},
    )
    files = SaveFiles(KeeperComponents(config, inbox, reports, watches, store))
    store.fail("put", FAILED, matching=names.part(5, 1, 0), times=None)
    for values in (torch.full((8,), torch.nan), torch.ones(8)):
        save, arena = staged(5, values)
        try:
            files.persist(save, arena, SaveValues())
        except RetryLater:
            store.clear()
        os.close(save.draft_fd)
    name = names.part(5, 1, 0)
    section = parts.parse(store.get(name), name).watches["finite-values"]
    assert (section.mark, section.data["num_bad"]) == (Mark.NONE, 0)


class Failing(holdfast.Watch):
    """Watch that fails in the thread that copies."""

    name: ClassVar[str] = "failing"

    @override
    def saving(self, save: CopiedSave) -> Section | None:
        raise ValueError("cannot save")


def test_a_watch_that_fails_while_copying_fails_no_save_even_if_warnings_are_errors(tmp_path: Path) -> None:
    ckpt = make_checkpointer(tmp_path / "run", {"w": torch.ones(3)}, watches=[Failing()])
    with warnings.catch_warnings():
        warnings.simplefilter("error", holdfast.WatchWarning)
        ckpt.save(1).wait_durable(600)
        with pytest.raises(holdfast.WatchWarning, match=r"'failing' has failed in saving\(\)"):
            ckpt.save(2)
        ckpt.save(2).wait_durable(600)
        ckpt.close()
    assert holdfast.open(tmp_path / "run").step == 2


@pytest.mark.parametrize("missing", ["num_bad", "bad", "squares"])
def test_a_section_that_lacks_a_member_is_not_healthy(missing: str) -> None:
    data = {"num_bad": 0, "bad": [], "squares": {}}
    del data[missing]
    save = CompleteSave(1, 1, {0: Section(1, data, Mark.NONE)}, lambda rank: ("w",))
    with pytest.raises(Corrupt, match=missing):
        ValuesKeeper({}).committing(save)
