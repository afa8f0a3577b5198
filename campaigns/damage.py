"""Damaged homes by the thousand: `make damage`.

Homes of one and two ranks, with and without a local folder, are made once by real trainings. Each case is a
copy with some random damages, and a restore of it. It must give a checkpoint that was saved, bit for bit, and
no older one than the newest that is untouched; or raise a HoldfastError, if none in home is. Training never
begins from zero beside files of checkpoints, and no other kind of error ever comes out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import torch

import holdfast
from campaigns import counts
from campaigns.crash_states import checks
from campaigns.crash_states.recording import environment, play
from campaigns.crash_states.workloads import Act, Workload
from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.store import open_store

HOMES = (
    Workload("one rank", "", (Act("save", (1, 1, 5, 4)), Act("save", (2, 6, 8, 4)))),
    Workload("two ranks", "", (Act("save_rank", (1, 1, 4, 3), world_size=2),)),
    Workload(
        "tiers",
        "",
        (Act("save_tiered", (1, 1, 5, 3)), Act("save_tiered", (2, 6, 8, 3))),
        has_local=True,
    ),
    Workload("two ranks, tiers", "", (Act("save_rank", (1, 1, 4, 3, 1), world_size=2),), has_local=True),
    Workload("frozen tensors", "", (Act("save_frozen", (1, 1, 4, 3)),)),
)
DEFAULT_CASES = 1500  # of each home


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one case."""

    seed: int
    outcome: str  # "newest", "older", "refused", "nothing left"
    problem: str = ""


# -- damages: each changes one file, or a few ----------------------------------------------------------------


def flip_bits(files: list[Path], draw: random.Random) -> None:
    """Flip a few bits of a file."""
    path = draw.choice(files)
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 2, 20])):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(files: list[Path], draw: random.Random) -> None:
    """Cut a file short."""
    path = draw.choice(files)
    os.truncate(path, draw.choice([0, 1, draw.randint(0, path.stat().st_size)]))


def make_hole(files: list[Path], draw: random.Random) -> None:
    """Zero a stretch of a file."""
    path = draw.choice(files)
    data = bytearray(path.read_bytes())
    start = draw.randint(0, len(data))
    end = min(len(data), start + draw.choice([16, 512, 4096, 1 << 20]))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def zero(files: list[Path], draw: random.Random) -> None:
    """Zero a whole file."""
    path = draw.choice(files)
    path.write_bytes(bytes(path.stat().st_size))


def fill_with_noise(files: list[Path], draw: random.Random) -> None:
    """Replace the bytes of a file by random ones."""
    path = draw.choice(files)
    path.write_bytes(draw.randbytes(path.stat().st_size))


def append_garbage(files: list[Path], draw: random.Random) -> None:
    """Append bytes to a file."""
    with draw.choice(files).open("ab") as file:
        file.write(draw.choice([b"\0", b"\n", b"{}", draw.randbytes(draw.choice([1, 100, 5000]))]))


def delete(files: list[Path], draw: random.Random) -> None:
    """Delete a file."""
    draw.choice(files).unlink()


def delete_kind(files: list[Path], draw: random.Random) -> None:
    """Delete every file of a kind: all claims, all manifests, all parts of a step."""
    kind = draw.choice(
        ["attempts/*", "step-*/manifest-*", "step-*/rank-*.json", "holdfast.json", "history/*"]
    )
    for path in _home_of(draw.choice(files)).glob(kind):
        path.unlink()


def swap(files: list[Path], draw: random.Random) -> None:
    """Swap the contents of two files."""
    first, second = draw.choice(files), draw.choice(files)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def swap_alike(files: list[Path], draw: random.Random) -> None:
    """Swap two files of one kind, such as the manifests of two steps."""
    first = draw.choice(files)
    swap([one for one in files if one.suffix == first.suffix and one.name[:4] == first.name[:4]], draw)


def copy_over(files: list[Path], draw: random.Random) -> None:
    """Give a file the contents of another one."""
    draw.choice(files).write_bytes(draw.choice(files).read_bytes())


def rename(files: list[Path], draw: random.Random) -> None:
    """Give a file the name of another attempt or step."""
    path = draw.choice(files)
    new = path.name.replace("a0001", "a0009") if draw.random() < 0.5 else path.name.replace("0000", "0001")
    path.rename(path.with_name(new))


def put_folder(files: list[Path], draw: random.Random) -> None:
    """Replace a file by a folder."""
    path = draw.choice(files)
    path.unlink()
    path.mkdir()


def lose_folder(files: list[Path], draw: random.Random) -> None:
    """Delete a folder."""
    shutil.rmtree(draw.choice(files).parent)


DAMAGES: tuple[Callable[[list[Path], random.Random], None], ...] = (
    flip_bits,
    flip_bits,
    truncate,
    make_hole,
    zero,
    fill_with_noise,
    append_garbage,
    delete,
    delete,
    delete_kind,
    swap,
    swap_alike,
    copy_over,
    rename,
    put_folder,
    lose_folder,
)


def _home_of(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name in ("home", "local"))


# -- one case ------------------------------------------------------------------------------------------------


def run_case(workload: Workload, original: Path, seed: int, *, is_resumed: bool) -> Result:
    """Damage a copy of a home, restore it, and judge the outcome."""
    draw = random.Random(seed)
    folder = Path(f"/dev/shm/holdfast-damage-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    os.environ |= {
        "HOLDFAST_RUNTIME_DIR": f"{folder}-runtime",
        "HOLDFAST_KEEP_IN_MEMORY": "0",
        "HOLDFAST_PREEMPTION": "none",
    }
    try:
        _damage(folder, draw)
        return _judge(workload, original, folder, seed, is_resumed=is_resumed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _damage(folder: Path, draw: random.Random) -> None:
    places = [folder / "home", folder / "local"] if draw.random() < 0.5 else [folder / "home"]
    for _ in range(draw.choice([1, 1, 1, 2, 3, 5, 10])):
        files = sorted(path for place in places for path in place.rglob("*") if path.is_file())
        if draw.random() < 0.5:  # the newest checkpoint is what a restore looks at
            newest = max((path.parent for path in files if path.parent.name[:5] == "step-"), default=None)
            files = [path for path in files if path.parent == newest] or files
        with contextlib.suppress(IndexError, OSError):  # no file is left, or a folder is there already
            draw.choice(DAMAGES)(files, draw)


def _judge(workload: Workload, original: Path, folder: Path, seed: int, *, is_resumed: bool) -> Result:
    home, local = folder / "home", folder / "local" if workload.has_local else None
    untouched = _untouched(original, folder)
    newest = max(_untouched(original, original))
    is_empty = not any(path.is_file() for path in folder.glob("*/step-*/*"))
    is_visible = any(path.is_file() for path in folder.glob(f"*/step-{newest[1]:08d}/manifest-*"))
    whole_in_home = _untouched(original, folder, tiers="home")  # a home that is lost may be refused
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _read_home(home)
            found = checks.restore(home, local, workload, quiet=False)
        if is_resumed:
            problems = checks.in_a_process(partial(_resume, home, local, workload))
            if problems:
                return Result(seed, "resumed", problems[0])
    except holdfast.HoldfastError as error:
        whole = max(whole_in_home, default=None)
        lost = f"refused, although {whole} is untouched in home: {error}" if whole else ""
        return Result(seed, "refused", lost)
    except Exception as error:  # noqa: BLE001 - any other kind of error is what is looked for
        return Result(seed, "raw", f"{type(error).__name__}: {error}")
    if found.place is None:
        return Result(seed, "nothing left", "" if is_empty else "training would begin from zero beside files")
    if found.place < max(untouched, default=(0, 0)):
        return Result(seed, "older", f"{found.place} was restored, although {max(untouched)} is untouched")
    if found.place == newest:
        return Result(seed, "newest")
    shown = f"step {newest[1]}"
    if is_visible and shown not in said.getvalue():
        return Result(seed, "older", f"{found.place} was restored, and {shown} was passed over in silence")
    return Result(seed, "older")


def _resume(home: Path, local: Path | None, workload: Workload) -> list[str]:
    try:
        return checks.save_on_top(home, local, workload)[1]
    except holdfast.HoldfastError:
        return []  # it has said why, and has not begun from zero


def _read_home(home: Path) -> None:
    """Read what commands read; only a HoldfastError may come out."""
    with contextlib.suppress(holdfast.HoldfastError):
        read_lines(open_store(home))
    with contextlib.suppress(holdfast.HoldfastError):
        holdfast.open(home).verify()


def _untouched(original: Path, folder: Path, tiers: str = "*") -> set[tuple[int, int]]:
    """Return the checkpoints of which every file is as it was in one of the tiers, as (attempt, step)."""
    found = set()
    for manifest in original.glob(f"{tiers}/step-*/manifest-*.json"):
        facts = names.parse(f"{manifest.parent.name}/{manifest.name}")
        assert facts is not None
        ending = f"a{facts.attempt:04d}"
        files = [path for path in manifest.parent.iterdir() if ending in path.name]
        there = [folder / path.relative_to(original) for path in files]
        pairs = zip(files, there, strict=True)
        if all(one.is_file() and one.read_bytes() == path.read_bytes() for path, one in pairs):
            found.add((facts.attempt, facts.step))
    return found


# -- the campaign --------------------------------------------------------------------------------------------


def main() -> int:
    """Run the command; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.damage", description=__doc__)
    parser.add_argument("--home", action="append", choices=[one.name for one in HOMES])
    parser.add_argument("--cases", type=int, default=DEFAULT_CASES, help="of each home")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began, found = time.monotonic(), []
    for workload in HOMES:
        if not options.home or workload.name in options.home:
            with made_home(workload) as original:
                results = list(run(workload, original, options.seed, options.cases, options.workers))
            found.append(_count(workload, results))
            for result in [one for one in results if one.problem][:20]:
                print(f"{workload.name}, seed {result.seed}: {result.outcome}: {result.problem[:400]}")
    if not options.home:
        counts.write("damage", found, seconds=time.monotonic() - began)
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        for one in found:
            print(f"{one.kind}: {one.cases:,} cases, {one.failures} failed; {one.detail}")
    return int(any(one.failures for one in found))


def run(workload: Workload, original: Path, seed: int, num_cases: int, num_workers: int) -> Iterator[Result]:
    """Run cases in parallel; one in fifty is also resumed by a process that saves on top."""
    seeds = range(seed, seed + num_cases)
    pool = ProcessPoolExecutor(num_workers, get_context("fork"), partial(torch.set_num_threads, 1))
    with pool:
        yield from pool.map(_case, repeat(workload), repeat(original), seeds, chunksize=20)


def _case(workload: Workload, original: Path, seed: int) -> Result:
    return run_case(workload, original, seed, is_resumed=seed % 50 == 0)


@contextlib.contextmanager
def made_home(workload: Workload) -> Iterator[Path]:
    """Return the folder of a workload that has run to its end."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-damage-"))
    try:
        play(workload, folder / "root", environment(folder))
        yield folder / "root"
    finally:
        shutil.rmtree(folder)


def _count(workload: Workload, results: list[Result]) -> counts.Count:
    outcomes = Counter(result.outcome for result in results)
    detail = ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes.most_common())
    return counts.Count(workload.name, len(results), sum(bool(one.problem) for one in results), detail)


if __name__ == "__main__":
    sys.exit(main())
