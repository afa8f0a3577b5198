"""Time and order in which files reach a bucket: a write-back directory beside rclone's mount.

rclone mounts with the flags that SkyPilot's MOUNT_CACHED gives it. It needs FUSE and rclone (Debian:
`apt-get install rclone fuse3`); where they are missing, this is reported. The bucket is ministack's, on this
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("src", ".", "tests")]

from holdfast.checkpoint.store import Store, open_store  # noqa: E402
from holdfast.jobs.writeback import mount  # noqa: E402
from tests.fault_proxy import FaultProxy  # noqa: E402
from tests.servers import BUCKET, Server, ministack  # noqa: E402

MB = 1 << 20
SKYPILOT_FLAGS = [
    *("--vfs-cache-mode", "full", "--dir-cache-time", "10s", "--vfs-cache-poll-interval", "10s"),
    *("--vfs-fast-fingerprint", "--vfs-cache-max-size", "10G", "--vfs-write-back", "1s"),
]
CONTESTANTS = ("holdfast", "rclone", "rclone --transfers 1")
CASES = {
    "checkpoint": [("shard-0", 100 * MB), ("shard-1", 100 * MB), ("COMMITTED", 10)],
    "many small": [*((f"file-{number:03}", 4096) for number in range(200)), ("COMMITTED", 10)],
}
WAYS = {"straight": 0.0, "10 MB/s a connection": 10e6}
LIMIT_S = 180.0
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Write and watch, each contestant in each round; no goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/writeback_<hardware>_<date>.json")
    options = parser.parse_args()
    directory = options.dir.resolve() / f"writeback-{os.getpid()}"
    directory.mkdir(parents=True)
    facts = machine.describe(directory) | {"rclone": _rclone_version(), "fuse": Path("/dev/fuse").exists()}
    runs = []
    try:
        for number in range(options.rounds):
            turn = number % len(CONTESTANTS)
            for contestant in (*CONTESTANTS[turn:], *CONTESTANTS[:turn]):
                for case in CASES:
                    for way in WAYS:
                        run = _run(contestant, case, way, directory)
                        runs.append(
                            {"round": number, "contestant": contestant, "case": case, "way": way, **run}
                        )
                        console.print(json.dumps(runs[-1]))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _report(options, facts, runs)
    return 0


def _run(contestant: str, case: str, way: str, directory: Path) -> dict[str, Any]:
    """One contestant, one case: a fresh server, directory and mount."""
    if contestant != "holdfast" and (missing := _missing()):
        return {"not_installed": missing}
    folder = directory / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with ministack() as server, FaultProxy("127.0.0.1", server.port) as proxy:
        os.environ.update(server.env)
        proxy.bytes_per_s = WAYS[way]
        port = proxy.port if WAYS[way] else server.port
        bucket = open_store(server.home())
        mounted = _holdfast if contestant == "holdfast" else _rclone
        try:
            with mounted(server, port, folder, contestant) as place:
                return _measure(place, bucket, CASES[case])
        except (OSError, RuntimeError) as error:
            return {"error": str(error)}


def _measure(place: Path, bucket: Store, files: list[tuple[str, int]]) -> dict[str, Any]:
    """Write the files, each fsynced, and see when each is in the bucket."""
    names = [name for name, _ in files]
    data = {name: os.urandom(num_bytes) for name, num_bytes in files}
    seen: dict[str, float] = {}
    began_s = time.perf_counter()
    watcher = threading.Thread(target=_watch, args=(bucket, names, seen, began_s))
    watcher.start()
    for name in names:
        with (place / name).open("wb") as file:
            file.write(data[name])
            file.flush()
            os.fsync(file.fileno())
    written_s = time.perf_counter() - began_s
    watcher.join()
    if len(seen) < len(names):
        return {"error": f"after {LIMIT_S:.0f} s, {len(names) - len(seen)} files were not in the bucket"}
    for name in names:
        if bucket.get(name) != data[name]:
            return {"error": f"{name} is not what was written"}
    arrived = sorted(names, key=lambda name: seen[name])
    before_marker = [name for name in names[:-1] if seen[name] > seen[names[-1]]]
    return {
        "written_s": written_s,
        "all_visible_s": max(seen.values()),
        "marker_visible_s": seen[names[-1]],
        "data_after_marker": len(before_marker),
        "is_ordered": all(seen[a] <= seen[b] for a, b in itertools.pairwise(names)),
        "first": arrived[0],
    }


def _watch(bucket: Store, names: list[str], seen: dict[str, float], began_s: float) -> None:
    """Note when each name is first listed."""
    while len(seen) < len(names) and time.perf_counter() - began_s < LIMIT_S:
        found = {entry.name for entry in bucket.list()}
        now_s = time.perf_counter() - began_s
        for name in names:
            if name in found:
                seen.setdefault(name, now_s)
        time.sleep(0.02)


@contextlib.contextmanager
def _holdfast(server: Server, port: int, folder: Path, _contestant: str) -> Iterator[Path]:
    with mount(folder / "mount", server.home(port=port), timeout_s=60) as held:
        yield held.directory
    held.close(timeout_s=60)


@contextlib.contextmanager
def _rclone(server: Server, port: int, folder: Path, contestant: str) -> Iterator[Path]:
    place, config = folder / "mount", folder / "rclone.conf"
    place.mkdir()
    config.write_text(
        f"[s]\ntype = s3\nprovider = Other\nendpoint = http://127.0.0.1:{port}\naccess_key_id = test\n"
        "secret_access_key = testsecret\nregion = us-east-1\nforce_path_style = true\n"
    )
    words = ["rclone", "--config", str(config), "mount", f"s:{BUCKET}", str(place), *contestant.split()[1:]]
    words += ["--cache-dir", str(folder / "cache"), "--log-file", str(folder / "log"), *SKYPILOT_FLAGS]
    env = {name: value for name, value in os.environ.items() if name != "AWS_CA_BUNDLE"}
    process = subprocess.Popen(words, env=env)
    try:
        _wait_for(lambda: os.path.ismount(place) or process.poll() is not None)
        if process.poll() is not None:
            raise RuntimeError(f"rclone did not mount: {(folder / 'log').read_text()[-300:]}")
        yield place
    finally:
        subprocess.run(["fusermount3", "-uz", str(place)], check=False, stderr=subprocess.DEVNULL)
        process.terminate()
        process.wait()


def _wait_for(what: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 30
    while not what() and time.monotonic() < give_up_s:
        time.sleep(0.02)


def _missing() -> str:
    absent = [name for name in ("rclone", "fusermount3") if shutil.which(name) is None]
    absent += [] if Path("/dev/fuse").exists() else ["/dev/fuse"]
    return ", ".join(absent)


def _rclone_version() -> str | None:
    if shutil.which("rclone") is None:
        return None
    done = subprocess.run(["rclone", "version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else None


def _report(options: argparse.Namespace, facts: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    path = options.out or machine.results_path("writeback", facts)
    document = {"machine": facts, "rounds": options.rounds, "flags": SKYPILOT_FLAGS, "writeback": runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
    table = Table("case", "way", "contestant", "written s", "marker seen s", "all seen s", "in order")
    for case in CASES:
        for way in WAYS:
            for contestant in CONTESTANTS:
                mine = (case, way, contestant)
                table.add_row(
                    *mine, *_cells([r for r in runs if (r["case"], r["way"], r["contestant"]) == mine])
                )
    console.print(table)
    console.print(f"wrote {path}")


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    good = [run for run in runs if "written_s" in run]
    if not good:
        return [next((run.get("not_installed") or run.get("error") or "" for run in runs), ""), "", "", ""]
    medians = [
        f"{statistics.median(run[key] for run in good):.2f}"
        for key in ("written_s", "marker_visible_s", "all_visible_s")
    ]
    return [*medians, f"{sum(run['data_after_marker'] == 0 for run in good)} of {len(runs)} (marker last)"]


if __name__ == "__main__":
    sys.exit(main())
