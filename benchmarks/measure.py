"""One contestant measured once on one state, in this process alone; run.py starts it and reads its answer."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import logging
import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import exact
import limits
import machine
import training
import unowned
from amounts import Amounts
from comparison import Comparison, summarize
from idle import wait_idle
from memory import Watch, footprint
from pagecache import evict, files_under, sync
from peers import find
from peers.contract import Peer, Pending
from rawwrite import RawWrite
from states import Subject, build

JUDGED = "holdfast"
MARGIN_BYTES = 2 << 30
"""Space on the disk beside the two states that are on it at most, while one is replaced by another."""


def main() -> None:
    """Read the order from the command line, write the answer as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant")
    parser.add_argument("state")
    parser.add_argument("directory", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--amounts", type=Amounts.parse, default=Amounts(), metavar="JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--others", action="store_true", help="change the state before each save; exactness")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # peers log every save
    options.answer.write_text(json.dumps(_facts(options.contestant)))  # left if this process is killed
    try:
        subject = functools.partial(build, options.state, options.device)
        answer = measure(
            options.contestant,
            subject,
            options.directory,
            options.amounts,
            is_others=options.others,
        )
    except BaseException as error:  # noqa: BLE001 - DCP's own is a BaseException; the answer carries it
        trouble = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answer = _facts(options.contestant) | trouble
    options.answer.write_text(json.dumps(answer))


def measure(
    contestant: str,
    build_subject: Callable[[], Subject],
    directory: Path,
    amounts: Amounts,
    *,
    is_others: bool = False,
) -> dict[str, Any]:
    """All numbers of one contestant: its `title`, `values` in seconds and bytes, and `comparisons`.

    With `is_others`, an optimizer step comes before each save: some engines skip what has not changed. There,
    a load or a training that fails leaves the other numbers, and `exact` has what the loads bring back.

    Raises:
        RuntimeError: the disk does not have space for two states.
    """
    if contestant == "limits":
        subject = build_subject()
        check_space(subject, directory)
        values = limits.measure(subject, directory) | {"state_bytes": float(subject.num_bytes)}
        return {"title": "raw limits", **_with_training(RawWrite, subject, directory, values, amounts)}
    kind = find(contestant)
    facts = _facts(contestant)
    if importlib.util.find_spec(kind.module) is None:
        return facts | {"not_installed": kind.module}
    subject = build_subject()
    check_space(subject, directory)
    if is_others:
        return facts | _measure_other(kind, subject, directory, amounts)
    values = {"state_bytes": float(subject.num_bytes)} | measure_saves(kind, subject, directory, amounts)
    if contestant == JUDGED:
        values |= {f"near_{key}": value for key, value in limits.copy_in_memory(subject).items()}
        values |= unowned.measure(subject, directory / "unowned") if amounts.has_unowned else {}
    return facts | _with_training(kind, subject, directory, values, amounts)


def check_space(subject: Subject, directory: Path) -> None:
    """Raise if a disk does not have space for two states."""
    needed, free = 2 * subject.num_bytes + MARGIN_BYTES, shutil.disk_usage(directory).free
    if free < needed:
        raise RuntimeError(
            f"{directory} has {free / 1e9:.1f} GB free; measuring {subject.name} needs {needed / 1e9:.1f} GB"
        )


def _with_training(
    kind: type[Peer], subject: Subject, directory: Path, values: dict[str, float], amounts: Amounts
) -> dict[str, Any]:
    comparisons: list[Comparison] = []
    if amounts.compared and subject.optimizer is not None:
        comparisons = measure_training(kind, subject, directory / "training", times=amounts.compared)
    return {
        "values": values | (summarize(comparisons) if comparisons else {}),
        "comparisons": [asdict(one) for one in comparisons],
    }


def _facts(contestant: str) -> dict[str, Any]:
    """Return the facts of a contestant that need no measurement."""
    if contestant == "limits":
        return {}
    kind = find(contestant)
    return {
        "title": kind.title,
        "syncs": kind.syncs,
        "overlaps": kind.overlaps,
        "own_load": kind.own_load,
        "loads_with": kind.loads_with,
        "version": machine.version(kind.package) if kind.package else None,
    }


def _measure_other(kind: type[Peer], subject: Subject, directory: Path, amounts: Amounts) -> dict[str, Any]:
    """Return the numbers of a method of the `--others` run, and the troubles of its parts."""
    troubles: dict[str, str] = {}
    values, last = time_process(kind, subject, directory, amounts, is_changed=True)
    values["state_bytes"] = float(subject.num_bytes)
    values["disk_bytes"] = float(sum(path.stat().st_blocks * 512 for path in files_under(directory)))
    comparisons: list[Comparison] = []
    try:
        values |= measure_loads(kind, subject, directory, last, amounts)
    except Exception as error:  # noqa: BLE001 - the saves are still worth reporting
        troubles["load"] = exact.failure(error)
    subject = build(subject.name, str(subject.device))  # a load that failed leaves half a state
    shutil.rmtree(directory)
    directory.mkdir()
    if amounts.compared and subject.optimizer is not None:
        try:
            comparisons = measure_training(kind, subject, directory / "training", times=amounts.compared)
            values |= summarize(comparisons)
        except Exception as error:  # noqa: BLE001 - as above
            troubles["training"] = exact.failure(error)
    return {
        "values": values,
        "comparisons": [asdict(one) for one in comparisons],
        "troubles": troubles,
        "exact": exact.check(kind, subject, directory / "exact"),
    }


def measure_saves(kind: type[Peer], subject: Subject, directory: Path, amounts: Amounts) -> dict[str, float]:
    """A first save, one whose memory is watched, some that are timed, and loads of the last one.

    None of them is left on the disk, which may have space for two states only.
    """
    values, last = time_process(kind, subject, directory, amounts)
    if kind.own_load and amounts.loads:
        values |= measure_loads(kind, subject, directory, last, amounts)
    kind(subject, directory).delete(last)
    return values


def time_process(
    kind: type[Peer], subject: Subject, directory: Path, amounts: Amounts, *, is_changed: bool = False
) -> tuple[dict[str, float], int]:
    """Return the numbers of the saves of a process, and the number of the last one, which is kept."""
    gc.collect()
    before = footprint()
    peer = kind(subject, directory)
    peer.open()
    started = time.perf_counter()
    peer.prepare()
    prepare_s = time.perf_counter() - started
    first = time_save(peer, 1)
    peer.delete(1)
    if is_changed:
        subject.change()
    with Watch() as watch:
        _finish(peer.save(2))
    peer.delete(2)
    peer.settle()
    gc.collect()
    values, last = time_saves(peer, subject, directory, amounts, first_step=3, is_changed=is_changed)
    peer.close()
    values |= {
        "prepare_s": prepare_s,
        "first_blocked_s": first["blocked_s"],
        "first_durable_s": first["durable_s"],
        "extra_bytes": float(watch.peak.total - before.total),
        "helper_bytes": float(watch.helpers_peak - before.helpers),
    }
    return values, last


def time_saves(
    peer: Peer,
    subject: Subject,
    directory: Path,
    amounts: Amounts,
    *,
    first_step: int,
    is_changed: bool = False,
) -> tuple[dict[str, float], int]:
    """Medians of some saves on an idle disk, and the number of the last one, which is kept.

    For what is judged, a raw write of as many bytes comes before each of them: a shared disk changes its
    speed within minutes.
    """
    found: list[dict[str, float]] = []
    depth = 0
    if peer.title == JUDGED:
        depth = limits.best_write_depth(subject.num_bytes, directory, amounts.depths)
    last = first_step + amounts.timed - 1
    for step in range(first_step, last + 1):
        if step > first_step:
            peer.delete(step - 1)
        if is_changed:
            subject.change()
        near = {}
        if depth:
            near = {"near_write_s": limits.write_and_delete(subject.num_bytes, directory, depth)}
        wait_idle(directory)
        found.append(time_save(peer, step) | near)
        peer.settle()
    return {key: statistics.median(one[key] for one in found) for key in found[0]}, last


def time_save(peer: Peer, step: int) -> dict[str, float]:
    """Seconds from the start of one save until its call, its copy, the peer and the disk are done."""
    started = time.perf_counter()
    pending = peer.save(step)
    blocked_s = time.perf_counter() - started
    pending.wait_staged()
    staged_s = time.perf_counter() - started
    pending.wait_complete()
    complete_s = time.perf_counter() - started
    if not peer.syncs:
        sync(peer.path(step))
    durable_s = time.perf_counter() - started
    return {"blocked_s": blocked_s, "staged_s": staged_s, "complete_s": complete_s, "durable_s": durable_s}


def measure_loads(
    kind: type[Peer], subject: Subject, directory: Path, step: int, amounts: Amounts
) -> dict[str, float]:
    """Seconds to load with nothing in the page cache (the median of some), and with everything there.

    The largest file is read raw before each cold load, so that both medians are of the same minute and of the
    same cache in the host: the best of a few raw reads is not what a disk does on average.

    Raises:
        RuntimeError: a load did not bring back every tensor.
    """
    expected = subject.digest()
    values: dict[str, float] = {}
    cold: list[float] = []
    raw: dict[int, list[float]] = {depth: [] for depth in amounts.depths}
    largest = _largest_file(directory)
    for _ in range(amounts.loads):
        for depth, seconds in limits.read_file_raw(largest, amounts.depths).items():
            raw[depth].append(seconds)
        values["cached_share"] = evict(directory)
        cold.append(_time_load(kind, subject, directory, step, expected))
    raw_s = min(statistics.median(seconds) for seconds in raw.values())
    values["near_read_s"] = raw_s * subject.num_bytes / largest.stat().st_size
    _read_all(directory)
    warm_s = _time_load(kind, subject, directory, step, expected)
    return values | {"load_cold_s": statistics.median(cold), "load_warm_s": warm_s}


def _time_load(kind: type[Peer], subject: Subject, directory: Path, step: int, expected: str) -> float:
    peer = kind(subject, directory)
    peer.open()
    subject.scramble()
    gc.collect()
    started = time.perf_counter()
    peer.load(step)
    seconds = time.perf_counter() - started
    if subject.digest() != expected:
        raise RuntimeError(f"{kind.title} did not bring back what was saved.")
    peer.close()
    return seconds


def measure_training(kind: type[Peer], subject: Subject, directory: Path, *, times: int) -> list[Comparison]:
    """Compare training with and without a save, after a first save; see `training.compare`."""
    directory.mkdir()
    loop = training.Loop(subject)
    peer = kind(subject, directory)
    peer.open()
    peer.prepare()
    _finish(peer.save(100))
    peer.settle()
    peer.delete(100)
    found = training.compare(subject, loop, peer, first_step=101, times=times)
    peer.close()
    return found


def _finish(pending: Pending) -> None:
    pending.wait_staged()
    pending.wait_complete()


def _largest_file(directory: Path) -> Path:
    return max(
        (path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def _read_all(directory: Path) -> None:
    """Bring the files into the page cache, also those of a peer that reads around it."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(16 << 20):
                    pass


if __name__ == "__main__":
    main()
