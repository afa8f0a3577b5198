"""Sections of parts: made once for each save, and of the bytes of that save."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from typing_extensions import override

import holdfast
from faulty_store import FaultyStore
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.layout import Shard, lay_out, whole
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.keeper.components import KeeperComponents
from holdfast.checkpoint.keeper.config import WatchConfig
from holdfast.checkpoint.keeper.inbox import StagedSave
from holdfast.checkpoint.keeper.lockfile import KeeperInfo
from holdfast.checkpoint.keeper.messages import ArenaLayout, SubmitSave
from holdfast.checkpoint.keeper.save_files import SaveFiles
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatches
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.watch import CopiedSave
from holdfast.errors import Corrupt, RetryLater
from holdfast.watch.values.keeper import ValuesKeeper
from keeper.test_commit import make_config
from making import make_home, make_reports, raw_bytes
from stage.training import make_checkpointer

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
    half = WatchConfig("finite-values", "holdfast.watch.values.keeper:ValuesKeeper", "", {})
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
