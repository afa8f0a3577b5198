"""Tiers as a rank sees them: which saves go home, what is claimed where, what was read from which."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.run import AttemptClaim
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.run.options import Home, Local
from holdfast.checkpoint.run.tiers import Base, Tiers
from holdfast.checkpoint.store import open_store
from holdfast.errors import InvalidInput, Unsupported
from holdfast.watch.report.saves import collect_saves, parse_events
from making import make_checkpoint, make_home


def make_tiers(folder: Path, **options: Any) -> Tiers:
    """Tiers of two folders."""
    local = options.pop("local", folder / "local")
    return Tiers(Home(folder / "home", **options), None if local is None else Local(local))


def claimed(tiers: Tiers, base: Base | None) -> AttemptClaim:
    """The claim of a single rank."""
    return tiers.claim(Ranks(timeout_s=60.0), (0,), base, take_over=False)


def test_a_policy_for_home_needs_a_nearer_place(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Home\(every=\) needs local="):
        make_tiers(tmp_path, local=None, every=10)


def test_memory_of_this_process_is_refused_as_a_tier(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="memory of this process"):
        make_tiers(tmp_path, local="memory://here")


def test_a_claim_is_written_to_both_places(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    claim = claimed(tiers, Base(None))
    near, home = (open_store(tmp_path / name) for name in ("local", "home"))
    assert claim.number == 1
    assert near.get(names.attempt(1)) == home.get(names.attempt(1))
    after = claimed(tiers, None)
    assert (after.run, after.number) == (claim.run, 2)


def test_a_local_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    make_home(open_store(tmp_path / "local"), run_id="another")
    tiers = make_tiers(tmp_path)
    with pytest.raises(InvalidInput, match="another run"):
        claimed(tiers, Base(None))
    state = {"w": torch.ones(3)}
    with (
        holdfast.Checkpointer(tmp_path / "home", state, local=tmp_path / "local", quiet=True) as ckpt,
        pytest.raises(InvalidInput, match="another run"),
    ):
        ckpt.restore()


@pytest.mark.parametrize("place", ["local", "home"])
def test_beginning_afresh_over_checkpoints_is_refused_wherever_they_are(tmp_path: Path, place: str) -> None:
    store = open_store(tmp_path / place)
    make_home(store)
    make_checkpoint(store, 7, 1, [{"w": torch.ones(3)}])
    with pytest.raises(InvalidInput, match="the newest of step 7"):
        claimed(make_tiers(tmp_path), Base(None, is_fresh=True))


def test_the_source_of_the_bytes_is_reported(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    local, home = str(tmp_path / "local"), str(tmp_path / "home")
    assert tiers.describe_sources({}) == home
    assert tiers.describe_sources({"memory": 5}) == "memory"
    assert tiers.describe_sources({local: 1_500_000, home: 10}) == f"{local} (1.5 MB) and {home} (10 B)"
    assert [tiers.name_of({place: 1}) for place in ("memory", local, home)] == ["memory", "local", "home"]


def test_a_wait_that_is_too_short_names_the_steps_that_are_not_in_home(tmp_path: Path) -> None:
    """The save is complete nearby, home is slow: the error names the step, and the copy continues."""
    state = {"w": torch.zeros(1_000_000)}
    with holdfast.Checkpointer(
        holdfast.Home(tmp_path / "home", every=100, bandwidth="4MB"),
        state,
        local=tmp_path / "local",
        quiet=True,
    ) as ckpt:
        save = ckpt.save(1)
        save.wait_durable()
        with pytest.raises(holdfast.RetryLater, match=r"Step 1 is complete in .*local, and not yet in"):
            ckpt.wait(timeout=0)
        ckpt.wait()
        save.wait_home()
    assert holdfast.open(tmp_path / "home").step == 1


def test_the_history_names_the_attempts_that_saved_and_completed_a_checkpoint(tmp_path: Path) -> None:
    """A save loses its manifest: the next start writes it, and records for which attempt."""
    home = tmp_path / "home"
    with holdfast.Checkpointer(home, {"w": torch.ones(9)}, local=tmp_path / "local", quiet=True) as ckpt:
        ckpt.save(7)
    for place in (home, tmp_path / "local"):
        open_store(place).delete(names.manifest(7, 1))
    with holdfast.Checkpointer(home, {"w": torch.zeros(9)}, local=tmp_path / "local", quiet=True) as ckpt:
        assert ckpt.restore() == 7
        assert not [line for line in read_lines(open_store(home))[0] if line["attempt"] == 2]
        ckpt.save(8)
    lines, _ = read_lines(open_store(tmp_path / "local"))
    told = {
        (line["event"], line["tier"]): line["detail"]
        for line in lines
        if line["attempt"] == 2 and line["step"] == 7
    }
    for tier in ("local", "home"):
        assert told["committed", tier] == "attempt 1, which ended before it could write the manifest"
    assert told["restored", "local"] == "attempt 1"
    assert told["drained", "home"] == "attempt 1"
    first, second = collect_saves(parse_events(lines))
    assert (first.attempt, first.outcome) == (1, "durable")
    assert (second.attempt, second.outcome) == (2, "durable")


def test_a_save_that_waited_for_memory_is_reported(tmp_path: Path) -> None:
    """Memory has room for one save, and home is slow."""
    state = {"w": torch.ones(500_000)}
    with holdfast.Checkpointer(
        holdfast.Home(tmp_path, bandwidth="20MB"), state, memory="3MB", quiet=True
    ) as ckpt:
        ckpt.prepare()  # otherwise the first save may wait for the memory to be prepared
        ckpt.save(1)
        ckpt.save(2)
    lines, _ = read_lines(open_store(tmp_path))
    saved = {line["step"]: line["detail"] for line in lines if line["event"] == "saved"}
    waited = {step: re.fullmatch(r"waited (\d+\.\d+) s for memory", detail) for step, detail in saved.items()}
    assert waited[2] is not None
    # On busy cores the first save may wait for its prepared memory, too, for a moment.
    assert waited[1] is None or float(waited[1][1]) < float(waited[2][1])
