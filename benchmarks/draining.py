"""Cost of a drain to a bucket for the training beside it, compared with a bare client."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine
import obstore
from remote import null_server
from rich.console import Console
from rich.table import Table
from states import build
from training import Loop

from holdfast.checkpoint.format import names, part
from holdfast.checkpoint.format.part import Part
from holdfast.checkpoint.keeper.drain import verified_blocks
from holdfast.checkpoint.store.address import parse_address
from holdfast.checkpoint.store.bucket import ObjectStore
from holdfast.checkpoint.store.clients import Clients
from holdfast.checkpoint.store.local import LocalStore

HERE = Path(__file__).resolve().parent
GOAL = 0.03
KINDS = ("quiet", "drain", "bare")
_NICENESS = 5  # the keeper's; the bare client gets it too, so that only the work differs
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Train with and without an upload in turns; exit status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", default="gpt2-124m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="training steps in a span")
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/draining_<hardware>_<date>.json")
    parser.add_argument("--send", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    if options.send:
        _send_on_request(options.send, options.dir)
        return 0
    directory = options.dir.resolve() / f"draining-{os.getpid()}"
    directory.mkdir(parents=True)
    facts = machine.describe(directory)
    try:
        runs, num_bytes = _measure(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return _report(options, facts, runs, num_bytes)


def _measure(options: argparse.Namespace, directory: Path) -> tuple[list[dict[str, float]], int]:
    import holdfast

    subject = build(options.state)
    loop = Loop(subject)
    objects: dict[str, Any] = {"model": subject.model, "optimizer": subject.optimizer}
    with holdfast.Checkpointer(directory, objects, every=10**9, quiet=True) as checkpointer:
        checkpointer.save(1)
    loop.watch_last()
    num_bytes = _saved_part(LocalStore(directory)).file.num_bytes
    loop.run(3)
    runs = []
    with null_server(num_bytes) as url, _Sender(url, directory) as sender:
        for number in range(-1, options.rounds):  # the first is thrown away
            shift = number % len(KINDS)
            run: dict[str, float] = {"round": number}
            for kind in KINDS[shift:] + KINDS[:shift]:
                run |= _span(loop, options.steps, sender, kind)
            run["beyond_bare"] = (run["drain_s"] - run["bare_s"]) / run["quiet_s"]
            if number >= 0:
                runs.append(run)
                console.print("  ".join(f"{key} {value:.3f}" for key, value in run.items()))
    return runs, num_bytes


def _span(loop: Loop, num_steps: int, sender: _Sender, kind: str) -> dict[str, float]:
    """Seconds of some steps, with one upload that begins and ends in them unless the span is quiet."""
    if kind == "quiet":
        return {"quiet_s": loop.run(num_steps).wall_s}
    span = loop.run(num_steps, save=lambda: sender.begin(kind))
    sent = sender.sent()
    if sent["seconds"] > span.wall_s:
        message = f"the upload took {sent['seconds']:.1f} s, the steps {span.wall_s:.1f} s: give more --steps"
        raise RuntimeError(message)
    return {f"{kind}_s": span.wall_s, f"{kind}_sent_s": sent["seconds"], f"{kind}_cpu_s": sent["cpu_seconds"]}


class _Sender:
    """A process that sends the saved file when it is requested to."""

    def __init__(self, url: str, directory: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--send", url, "--dir", str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, kind: str) -> None:
        """Start an upload."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()

    def sent(self) -> dict[str, float]:
        """Wait until it is over: what it took."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _send_on_request(url: str, directory: Path) -> None:
    """The sender's side: one upload for each line on stdin."""
    from remote import timed

    os.nice(_NICENESS)
    near, address = LocalStore(directory), parse_address(url)
    home, client = ObjectStore(address), Clients(address).get(retrying=True)
    saved = _saved_part(near)
    name = names.data(saved.step, saved.attempt, saved.rank)

    def drain() -> None:  # what the keeper's drain does with a data file
        home.put_parts(name, verified_blocks(near, name, saved.file), saved.file.num_bytes)

    def bare() -> None:
        with (directory / name).open("rb") as file:
            obstore.put(
                client,
                address.key(name),
                file,
                chunk_size=address.part_bytes,
                max_concurrency=address.parallel,
            )

    for line in sys.stdin:
        print(json.dumps(timed(drain if line.strip() == "drain" else bare)), flush=True)


def _saved_part(store: LocalStore) -> Part:
    name = names.part(1, 1, 0)
    return part.parse(store.get(name), name)


def _report(
    options: argparse.Namespace, facts: dict[str, Any], runs: list[dict[str, float]], num_bytes: int
) -> int:
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "round"}
    path = options.out or machine.results_path("draining", facts)
    document = {"machine": facts, "state": options.state, "bytes": num_bytes, "steps": options.steps}
    path.write_text(json.dumps(document | {"medians": medians, "runs": runs}, indent=1) + "\n")
    title = f"{options.steps} training steps, with one upload of {num_bytes / 1e9:.2f} GB in them"
    table = Table("", "median", "least", "most", title=title)
    for key, value in medians.items():
        values = [run[key] for run in runs]
        table.add_row(key, f"{value:.3f}", f"{min(values):.3f}", f"{max(values):.3f}")
    console.print(table)
    console.print(f"goal: beyond_bare at most {GOAL}; wrote {path}")
    return int(medians["beyond_bare"] > GOAL)


if __name__ == "__main__":
    sys.exit(main())
