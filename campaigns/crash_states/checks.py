"""Checks of one state in a folder: what must hold wherever a crash may have come."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a Checkpointer imports it, which takes seconds: once here, not in every forked worker

import holdfast
from campaigns.crash_states import trainer
from campaigns.crash_states.workloads import Workload
from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.run import attempt as attempts
from holdfast.checkpoint.store import open_store

Place = tuple[int, int]  # (branch, step), ordered as checkpoints are
_MARKS = ("durable", "home", "training", "done", "restored")
_RESUME_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Promises:
    """Everything that the workload was promised before the crash."""

    durable: tuple[Place, ...]
    home: tuple[Place, ...]
    done: Place | None  # where the run finished, unless it was continued since

    @classmethod
    def read(cls, marks: Collection[str]) -> Promises:
        """Return the promises that are in the texts of marks."""
        found: dict[str, list[Place]] = {
            kind: [] for kind in ("durable", "home", "training", "done", "restored")
        }
        for text in marks:
            kind, branch, step = text.split()
            if step != "None":
                found[kind].append((int(branch), int(step)))
        durable = sorted({*found["durable"], *found["home"]})
        done = max(found["done"], default=None)
        if done and max(found["training"], default=done) > done:
            done = None  # the run was continued after it had finished
        return cls(tuple(durable), tuple(sorted(found["home"])), done)


@dataclass(frozen=True, slots=True)
class Restored:
    """A state that came back: of which branch and step it is."""

    place: Place | None  # None: there was no checkpoint, and training would start from zero


def check(folder: Path, workload: Workload, promises: Promises) -> list[str]:
    """Return all that is wrong with what a crash left in `folder`.

    Args:
        folder: holds `home`, and perhaps `local`; a restore may write into it.
        workload: that was interrupted.
        promises: what it had been promised before.
    """
    if workload.is_bucket:
        return _check_bucket(folder / "bucket", max(promises.home, default=(0, 0))[1])
    home, local = folder / "home", folder / "local" if workload.has_local else None
    problems: list[str] = []
    with _reporting(problems, "a look at every visible checkpoint"):
        complete = check_visible(home, problems)
        if local is not None:
            check_visible(local, problems)
        problems += _lost(complete, promises.durable, workload.keep)
    newest = max(promises.durable, default=None)
    with _reporting(problems, "a look at the newest checkpoint"):
        if local is None:
            problems += _too_old("open()", _open_newest(home), newest)
    if workload.restores:
        with _reporting(problems, "a restore"):
            problems += _too_old("restore()", restore(home, local, workload), newest)
        if local is not None:
            with _reporting(problems, "a restore on another host"):
                problems += _too_old(
                    "restore()", restore(home, None, workload), max(promises.home, default=None)
                )
    with _reporting(problems, "a look at the history"):
        read_lines(open_store(home))
    if promises.done:
        with _reporting(problems, "the done marker"):
            done = run.parse(run.Done, open_store(home).get(names.DONE), names.DONE)
            if done.step < promises.done[1]:
                problems.append(f"done.json is of step {done.step}, and {promises.done[1]} was finished")
    return problems


def _check_bucket(bucket: Path, drained: int) -> list[str]:
    """Return what is wrong with the place that a write-back directory sends to.

    Args:
        bucket: the place.
        drained: number of the newest file when `drain()` last returned; 0 before.
    """
    problems: list[str] = []
    with _reporting(problems, "a look at the bucket"):
        store = open_store(bucket)
        found = {entry.name: store.get(entry.name) for entry in store.list()}
        for name, data in found.items():
            number = name.removeprefix("data-")
            if number.isdigit() and data != trainer.written(int(number)):
                problems.append(f"{name} is visible and has other bytes than were written")
        latest = int(found.get("latest", b"0"))
        if latest and f"data-{latest}" not in found:
            problems.append(f"latest names data-{latest}, which is not there")
        missing = [number for number in range(1, drained + 1) if f"data-{number}" not in found]
        if latest < drained or missing:
            problems.append(f"{drained} was drained; latest is {latest}, and {missing} are missing")
    return problems


@contextmanager
def _reporting(problems: list[str], what: str) -> Iterator[None]:
    """Turn any error into a problem: nothing may fail in any state."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any kind of error is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        kind = "error" if isinstance(error, holdfast.HoldfastError) else "RAW error"
        problems.append(
            f"{kind} in {what}: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        )


def check_visible(home: Path, problems: list[str]) -> list[Place]:
    """Verify every checkpoint that a home calls complete; return (branch, step) of those that are good."""
    found = []
    for attempt, step in candidates(list_home(open_store(home))):
        key = _bytes_of(home, step)
        if (attempt, key) not in _verified:
            seen: list[str] = []
            _verified[attempt, key] = _verify(home, step, attempt, seen), seen
        place, seen = _verified[attempt, key]
        problems += seen
        if place is not None:
            found.append(place)
    return found


_verified: dict[tuple[int, bytes], tuple[Place | None, list[str]]] = {}
"""The answers for bytes that this process has verified before: most checkpoints are in many states."""


def _bytes_of(home: Path, step: int) -> bytes:
    """Return a hash of all that is read to verify a step."""
    text = hashlib.blake2b(digest_size=16)
    for path in sorted([home / names.RUN, *(home / names.step_dir(step)).iterdir()]):
        if path.is_file():
            text.update(path.name.encode() + b"\0" + path.read_bytes())
    return text.digest()


def _verify(home: Path, step: int, attempt: int, problems: list[str]) -> Place | None:
    opened = holdfast.open(home, step=step, attempt=attempt)
    damage = opened.verify().problems
    if damage:
        problems.append(f"step {step} of attempt {attempt} is visible and not whole: {damage[0]}")
        return None
    places = {_check_tensors(opened.tensors(rank), step, problems) for rank in range(opened.world_size)}
    if len(places) > 1:
        problems.append(f"the ranks of step {step} hold the states of {sorted(places)}")
    return min(places)


def _check_tensors(tensors: dict[str, torch.Tensor], step: int, problems: list[str]) -> Place:
    """Compare tensors with what a save of that step held; return (branch, step)."""
    by_word = {re.split(r"[./]", name)[-1]: tensor for name, tensor in tensors.items()}
    branch, stamped = by_word["stamp"].tolist()
    if stamped != step:
        problems.append(f"step {step} holds the state of step {stamped}")
    for word, tensor in by_word.items():
        if word in (*trainer.SHAPES, "moment"):
            expected = trainer.pattern(word, branch, stamped, tuple(tensor.shape))
            if not torch.equal(tensor, expected):
                problems.append(f"{word} of step {step} has other bytes than were saved")
    return branch, stamped


def _lost(complete: list[Place], durable: Collection[Place], keep: int | None) -> list[str]:
    """Return what retention must have kept and is not there."""
    if keep is None:
        return []
    return [
        f"step {one[1]} was durable and is gone, although fewer than {keep} newer ones are there"
        for one in durable
        if one not in complete and sum(other > one for other in complete) < keep
    ]


def _too_old(what: str, found: Restored, newest: Place | None) -> list[str]:
    if newest is None or (found.place is not None and found.place >= newest):
        return []
    got = "nothing" if found.place is None else f"step {found.place[1]} of start {found.place[0]}"
    return [f"{what} gave {got}, and step {newest[1]} of start {newest[0]} was durable"]


def _open_newest(home: Path) -> Restored:
    try:
        opened = holdfast.open(home)
    except holdfast.NotFound:
        return Restored(None)
    problems: list[str] = []
    found = Restored(_check_tensors(opened.tensors(), opened.step, problems))
    if problems:
        raise AssertionError(problems)
    return found


# -- restoring -----------------------------------------------------------------------------------------------


class _NoKeeper:
    """A stand-in for the keeper of a Checkpointer that only restores, since a process takes too long."""

    def __init__(self, config: Any, **_: Any) -> None:
        self.config, self.problems, self.fenced, self.home_lost = config, [], None, None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def restore(home: Path, local: Path | None, workload: Workload, *, quiet: bool = True) -> Restored:
    """Restore as a training does, in this process and without a keeper, and compare what came back.

    Raises:
        HoldfastError: no checkpoint could be restored.
        AssertionError: the state that came back is not what was saved.
    """
    state = trainer.state_of(0, 0, trainer.WIDE if workload.is_wide else trainer.SHAPES)
    real, attempts.Keeper = attempts.Keeper, _NoKeeper  # pyright: ignore[reportAttributeAccessIssue]
    try:
        made = holdfast.Checkpointer(
            home,
            state,
            local=local,
            quiet=quiet,
            watches=[holdfast.Preemption("none", signals=False), holdfast.CompileCache("off")],
        )
        step = made.restore(only=list(state))
        made.close()
    finally:
        attempts.Keeper = real
    return _restored(state, step)


def _restored(state: dict[str, Any], step: int | None) -> Restored:
    if step is None:
        return Restored(None)
    problems: list[str] = []
    found = Restored(_check_tensors(state, step, problems))
    if problems:
        raise AssertionError(problems)
    return found


def resume(folder: Path, workload: Workload, promises: Promises) -> list[str]:
    """Restore in a process of its own with a real keeper, save on top, and look at what is there then.

    Blocks: about a second.
    """

    def work() -> list[str]:
        home, local = folder / "home", folder / "local" if workload.has_local else None
        found, problems = save_on_top(home, local, workload)
        problems += _too_old("restore()", found, max(promises.durable, default=None))
        check_visible(home, problems)
        left = [str(path) for path in home.glob("step-*/.unfinished-*")]
        if left:
            problems.append(f"unfinished files stay for ever: {left[:3]}")
        return problems

    return in_a_process(work)


def save_on_top(home: Path, local: Path | None, workload: Workload) -> tuple[Restored, list[str]]:
    """Restore, save the next step, and restore again; return what came first, and what is wrong.

    Raises:
        HoldfastError: no checkpoint could be restored, or the save failed.
    """
    state = trainer.state_of(0, 0, trainer.WIDE if workload.is_wide else trainer.SHAPES)
    branch = 100  # after every recorded one
    with holdfast.Checkpointer(
        home, state, local=local, keep=2, quiet=True, watches=[holdfast.Preemption("none", signals=False)]
    ) as made:
        step = made.restore(only=list(state))
        first = _restored(state, step)
        following = (step or 0) + 1
        trainer.set_state(state, branch, following)
        made.save(following).wait_durable()
        made.wait()
    again = restore(home, local, workload)
    if again.place == (branch, following):
        return first, []
    return first, [f"step {following} was saved on top, and restore() gave {again.place}"]


def in_a_process(work: Callable[[], list[str]]) -> list[str]:
    """Return what `work` finds in a fork of this process; an error or a hang in it is a problem too."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            signal.alarm(_RESUME_TIMEOUT_S)  # a hang becomes a failure
            os.write(writing, json.dumps(work()).encode()[:60000])
            status = 0
        except BaseException:  # noqa: BLE001 - the child must not return into the campaign
            os.write(writing, json.dumps([f"a process failed: {traceback.format_exc()[-1500:]}"]).encode())
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else [f"a process ended with status {status} and no word"]
