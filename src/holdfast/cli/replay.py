"""`holdfast replay`: runs recorded steps of a training again, and compares the result with its checkpoint."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.exchange.home_writer import copy_checkpoint
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.home.newest import from_listing
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.retention import line_of
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.factory import absolute_place
from holdfast.cli import TROUBLE, experiment, print_note
from holdfast.cli.commands import HOME, argument, command, script_arguments, step_number
from holdfast.cli.homes import open_home
from holdfast.cli.tables import print_result
from holdfast.errors import Corrupt, InvalidInput, NotFound
from holdfast.system.documents import to_plain
from holdfast.system.environment import place_in_sandbox
from holdfast.system.units import plural

SOUND, DIFFERS, RANDOM = "sound", "differs", "not deterministic"
"""Verdicts: equal to the record; both replays agree, and differ from it; they differ from each other."""


class ReplayVerdict(Struct, frozen=True):
    """Verdict of a replay."""

    name: str
    differences: list[experiment.DifferenceRow]  # from the record, or of the replays if these differ
    matches_once: bool  # one of two replays equals the record


def judge(
    record: list[experiment.DifferenceRow],
    again: list[experiment.DifferenceRow],
    between: list[experiment.DifferenceRow],
) -> ReplayVerdict:
    """Return the verdict.

    Values that differ between two replays are no evidence about the record, such as a time, or generators
    that nobody has seeded. Without them, the others are compared, unless a tensor is among them.

    `record` and `again` are the differences of the two replays from the record, `between` those of the two.
    """
    if not record:
        return ReplayVerdict(SOUND, [], matches_once=False)
    if any(row.is_tensor and not row.key.startswith("rng.") for row in between):
        return ReplayVerdict(RANDOM, between, matches_once=not again)
    varying = {row.key for row in between}
    rows = [row for row in record if row.key not in varying]
    return ReplayVerdict(DIFFERS if rows else SOUND, rows, matches_once=False)


Metrics = Mapping[int, Mapping[str, float]]
"""Values of metrics, by step and name."""


def first_difference(recorded: Metrics, replayed: Metrics) -> dict[str, Any] | None:
    """Return the first recorded metric that differs, as JSON; None if all that both have are equal."""
    for step in sorted(recorded.keys() & replayed.keys()):
        for name in sorted(recorded[step].keys() & replayed[step].keys()):
            old, new = recorded[step][name], replayed[step][name]
            if old != new and not (math.isnan(old) and math.isnan(new)):
                return {"step": step, "name": name, "recorded": old, "replayed": new}
    return None


_MAX_SHOWN = 10


def find_span(store: Store, step: int | None, to_step: int | None) -> tuple[Manifest, Manifest]:
    """Return two checkpoints of the current line, the second trained from the first.

    By default the first is the one before the other, and the other the one after the first, or the newest.
    """

    def find_listed() -> tuple[Manifest, Manifest]:
        newest = open_checkpoint(store).manifest
        line = line_of(candidates(list_home(store)), newest.checkpoint_id, newest.ancestors).current
        attempts = {one.step: one.attempt for one in reversed(line)}  # of a step saved again, the newest
        chosen = _choose(sorted(attempts), step, to_step, store.url)
        first, last = (open_checkpoint(store, one, attempts[one]).manifest for one in chosen)
        return first, last

    start, end = from_listing(find_listed)
    if start.world_size != end.world_size:
        raise InvalidInput(
            f"Step {start.step} was saved on {plural(start.world_size, 'rank')} and step {end.step} on "
            f"{end.world_size}. Results depend on the number of ranks, so they cannot be compared. Choose "
            "two steps of the same number with --step and --to."
        )
    return start, end


def _choose(steps: list[int], step: int | None, to_step: int | None, url: str) -> tuple[int, int]:
    for wanted in (step, to_step):
        if wanted is not None and wanted not in steps:
            shown = ", ".join(map(str, steps[-_MAX_SHOWN:]))
            raise NotFound(
                f"{url} does not hold a complete checkpoint of step {wanted} on the way to the newest one. "
                f"It holds those of steps {shown}."
            )
    if step is not None:
        first = step
        last = min((one for one in steps if one > step), default=step) if to_step is None else to_step
    else:
        last = steps[-1] if to_step is None else to_step
        first = max((one for one in steps if one < last), default=last)
    if first >= last:
        raise InvalidInput(
            f"A replay needs two checkpoints: one to start from, and a later one to compare with. {url} "
            f"holds those of {plural(len(steps), 'step')}: {', '.join(map(str, steps[-_MAX_SHOWN:]))}."
        )
    return first, last


def _recorded_metrics(store: Store, start: Manifest, end: Manifest) -> Metrics:
    """Return the metrics that the run recorded between the two checkpoints."""
    found = experiment.recorded_values(store)
    return {step: values for step, values in found.items() if start.step < step <= end.step}


_STATUS = {SOUND: 0, DIFFERS: 1, RANDOM: 3}
"""Exit status of each verdict."""


@command(
    "replay",
    """
    holdfast replay runs/gpt train.py --lr 0.1
    holdfast replay runs/gpt --step 500 train.py
    holdfast replay s3://bucket/gpt --step 500 --to 1500 -- torchrun --nproc-per-node 2 train.py
    """,
    *HOME,
    argument("--step N", "step to start from (default: the one before --to)", step_number),
    argument("--to M", "step to compare (default: the next saved, or the newest)", step_number),
    argument("--timeout TIME", "time limit of each of up to 2 runs", default="1h"),
    argument("--keep DIR", "copy the sandbox of the runs to this folder"),
    *script_arguments("training script, or any command"),
    details=(
        "The script runs in a sandbox, and HOME is only read. The exit status is 0 if the result equals the "
        "record, 1 if it differs, and 3 if the training is not deterministic here."
    ),
)
def run(args: argparse.Namespace) -> int:
    """Replay the steps, and print the verdict."""
    store, _ = open_home(args.home)
    start, end = find_span(store, args.step, args.to)
    try:
        with experiment.trials("replay", args) as trials:
            report = _replay(store, absolute_place(args.home), start, end, trials)
    except Corrupt as error:  # 1 would mean that the replay differs
        print_note(error)
        return TROUBLE
    print_result(args, report, lambda: _print(report))
    return _STATUS[report["verdict"]]


def _replay(
    store: Store, place: str, start: Manifest, end: Manifest, trials: experiment.Trials
) -> dict[str, Any]:
    """Run the steps, and again if the result differs from the record. Return everything that was found."""

    def run_again(which: str, name: str) -> experiment.Side:
        """Run the steps from a copy of the first checkpoint. Return the last checkpoint."""
        home = place_in_sandbox(trials.homes(which), place)
        home.mkdir(parents=True)
        copy_checkpoint(store, open_store(os.fspath(home)), start)
        what = f"{which} replay of steps {start.step} to {end.step}"
        print_note(what)
        trace = trials.run(which, what, {"save_at": [end.step], "end_at": end.step})
        if trace.restored != start.step:
            raise InvalidInput(
                f"The script did not restore step {start.step}, but {trace.restored or 'nothing'}. It must "
                f"use the home {place}, restore, and train to step {end.step}. Give it the arguments that "
                "the run had."
            )
        replayed = experiment.open_side(name, os.fspath(home), end.step)
        if (num_ranks := replayed.checkpoint.world_size) != end.world_size:
            raise InvalidInput(
                f"The replay ran on {plural(num_ranks, 'rank')}, and the recorded steps on {end.world_size}. "
                "Results depend on the number of ranks: start as many."
            )
        return replayed

    recorded = experiment.open_side("the record", store.url, end.step, end.attempt)
    first = run_again("first", "the replay")
    record, num_compared = experiment.compare_sides(recorded, first)
    again, between = [], []
    if record:
        second = run_again("second", "the second replay")
        again, _ = experiment.compare_sides(recorded, second)
        between, _ = experiment.compare_sides(replace(first, name="the first replay"), second)
    verdict = judge(record, again, between)
    replayed = _recorded_metrics(first.store, start, end)
    metric = first_difference(_recorded_metrics(store, start, end), replayed)
    return {
        "home": store.url,
        "step": start.step,
        "attempt": start.attempt,
        "to_step": end.step,
        "to_attempt": end.attempt,
        "world_size": end.world_size,
        "verdict": verdict.name,
        "matches_once": verdict.matches_once,
        "num_compared": num_compared,
        "differences": [to_plain(row) for row in verdict.differences],
        "metric": None if verdict.name == SOUND else metric,
    }


def _print(report: dict[str, Any]) -> None:
    span = f"Steps {report['step']} to {report['to_step']}"
    saved = f"the checkpoint that attempt {report['to_attempt']} saved"
    if report["verdict"] == SOUND:
        compared = plural(report["num_compared"], "tensor")
        _show(f"{span} are sound: run again, they give {saved}, bit for bit. {compared} and values compared.")
        return
    if report["verdict"] == RANDOM:
        _show(
            f"{span} were run twice with different results, so this training is not deterministic here, and "
            "the record cannot be judged. Seed it, and use deterministic kernels "
            "(torch.use_deterministic_algorithms)."
        )
        if report["matches_once"]:
            _show(
                "One of the two runs equals the record. If the kernels are deterministic, check this machine."
            )
        print("The two runs differ in:")
    else:
        _show(f"{span} were run twice with equal results, which differ from {saved}:")
    experiment.print_rows(report["differences"])
    if metric := report["metric"]:
        _show(
            f"The first recorded metric that differs is {metric['name']} of step {metric['step']}: "
            f"{metric['recorded']!r} in the record, {metric['replayed']!r} here."
        )
    if report["verdict"] == DIFFERS:
        _show(
            "Either a machine computed wrong numbers, or the two differ in something else: the script, its "
            "arguments or data, the version of torch, the kind of processor or GPU, or the number of "
            "threads. Replay it on a third machine of the same kind to find out which of the two is right."
        )


def _show(text: str) -> None:
    print(textwrap.fill(text, 80))
