"""`holdfast check`: kills and resumes a training script, and compares it with an uninterrupted run."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from holdfast.cli import experiment
from holdfast.cli.commands import argument, command, count, script_arguments
from holdfast.cli.tables import print_result
from holdfast.errors import InvalidInput
from holdfast.system.units import plural

_LOADER = (
    "Use DataLoader(data, batch_sampler=batches, generator=torch.Generator()) with batches = "
    "holdfast.train.data.GlobalBatches(len(data), batch_size), and add batches to the state; without a "
    "loader, derive the batch from the step."
)


def find_causes(
    whole: experiment.Trace,
    resumed: experiment.Trace,
    homes: tuple[Path, Path],
    restored: int,
    *,
    ignored: Collection[str],
) -> Iterator[str]:
    """Yield the probable causes of a difference, from the traces and the homes of the two runs."""
    batch_step = experiment.first_batch(whole, resumed, restored)
    step, names = experiment.first_step(whole.generators, resumed.generators, restored, ignored)
    if batch_step is not None:
        yield (
            f"The resumed run got another batch in step {batch_step}: the position in the data, "
            f"or its order, was not restored. {_LOADER}"
        )
    elif step is not None:
        yield (
            f"The generators of {' and '.join(names)} differ after step {step}: the resumed "
            "run drew more or fewer random numbers after its restore than the other run in the same steps. "
            "Objects that draw when they start, such as a loader, need their own generator. Do not seed "
            "after restore()."
        )
    elif not whole.doubts:
        texts = map(experiment.recorded_texts, homes)
        _, records = experiment.first_step(next(texts), next(texts), restored)
        where = f" First seen in {', '.join(records)}." if records else ""
        yield (
            f"Batches and random numbers after step {restored} are the same, so something that controls "
            "training is not in the state, or was not restored: a schedule, a counter in a variable of the "
            "script, a tensor that no state_dict() has, or a load_state_dict() that ignores a part."
            f"{where} Add it to the state, and read it from there."
        )


@command(
    "check",
    """
    holdfast check train.py --lr 0.1
    holdfast check --steps 20 train.py
    holdfast check -- torchrun --nproc-per-node 2 train.py
    """,
    argument("--steps N", "save after N steps, compare after 2 N", count, default=5),
    argument("--timeout TIME", "time limit of each of the 4 runs", default="10m"),
    argument("--keep DIR", "copy the homes, traces and logs of the runs to this folder"),
    *script_arguments("training script, or any command"),
    details="The exit status is 1 if resuming is not exact.",
)
def run(args: argparse.Namespace) -> int:
    """Run the trials, and print the differences. The exit status is 1 if resuming is not exact."""
    with experiment.trials("check", args) as trials:
        report = _check(trials, args.steps)
    print_result(args, report, lambda: _print(report))
    return int(not report["exact"])


def _check(trials: experiment.Trials, steps: int) -> dict[str, Any]:
    save_at, whole = _run_whole(trials, steps)
    end_at = min(experiment.newest_steps(trials.homes("a")).values())
    kill_at = save_at + max(1, (end_at - save_at) // 2)
    plan = {"save_at": [save_at, end_at], "end_at": end_at}
    repeated = trials.run("again", f"uninterrupted once more, to step {end_at}", plan)
    again, _ = _differences(trials.homes("a"), trials.homes("again"), end_at)
    # Unseeded generators differ too. If nothing else does, the training does not use them.
    is_random = not all(row.key.startswith("rng.") for row in again)
    killed = {**plan, "kill_at": kill_at, "end_at": None}
    trials.run("b", f"killed after step {kill_at} or at the next save", killed, is_killed=True)
    resumed = trials.run("b", f"resumed, to step {end_at}", plan)
    homes = trials.homes("a"), trials.homes("b")
    rows, num_compared = _differences(*homes, end_at)
    restored = resumed.restored if resumed.restored is not None else 0
    random_keys = {row.key for row in again}
    rows = [row for row in rows if row.key not in random_keys]
    causes = [one["text"] for one in whole.doubts if rows or not one["would_show"]]
    if rows:
        ignored = experiment.unseeded(whole, repeated)
        causes += find_causes(whole, resumed, homes, restored, ignored=ignored)
    if resumed.restored is None:
        what = "The resumed run did not restore a checkpoint: call restore(), or loop over steps()."
        causes.insert(0, what)
    return {
        "exact": not rows and not is_random and not causes,
        "deterministic": not is_random,
        "saved_at": save_at,
        "killed_at": kill_at,
        "restored": resumed.restored,
        "compared_at": end_at,
        "num_compared": num_compared,
        "random": [{"key": row.key, "how": row.how} for row in again if is_random],
        "differences": [{"key": row.key, "how": row.how} for row in rows],
        "causes": causes,
    }


def _run_whole(trials: experiment.Trials, steps: int) -> tuple[int, experiment.Trace]:
    """Run the script without interruption. Return the step of its first save, and the trace."""
    end_at = 2 * steps
    plan = {"save_at": [steps, end_at], "end_at": end_at, "num_saves": 2}
    whole = trials.run("a", f"uninterrupted, to step {end_at}", plan)
    found = experiment.newest_steps(trials.homes("a"))
    if not found:
        raise InvalidInput("The script saved no checkpoint, so there is nothing to compare.")
    end = min(found.values())
    if end >= end_at:
        return (whole.saved[0] if whole.saved else steps), whole
    if end < 2:
        raise InvalidInput(f"The script ends after {plural(end, 'step')}; at least 2 are needed.")
    shutil.rmtree(trials.homes("a"))
    plan = {"save_at": [end // 2, end], "end_at": end}
    return end // 2, trials.run("a", f"uninterrupted, to its end at step {end}", plan)


def _differences(a: Path, b: Path, step: int) -> tuple[list[experiment.DifferenceRow], int]:
    """Compare the checkpoints of a step in all homes of two trials."""
    rows: list[experiment.DifferenceRow] = []
    num_compared = 0
    for home in experiment.newest_steps(a):
        if home not in experiment.newest_steps(b):
            rows.append(experiment.DifferenceRow("(all)", "missing in the other run"))
            continue
        whole = experiment.open_side("the uninterrupted run", os.fspath(a / home), step)
        resumed = experiment.open_side("the resumed run", os.fspath(b / home), step)
        found, number = experiment.compare_sides(whole, resumed)
        num_compared += number
        rows += found
    return rows, num_compared


def _print(report: dict[str, Any]) -> None:
    if report["random"]:
        print("Two uninterrupted runs differ, so the script is not deterministic. Seed it, and use")
        print("deterministic kernels; then resuming can be exact. The two differ in:")
        experiment.print_rows(report["random"])
    if report["differences"]:
        print(
            f"Resuming is not exact: killed after step {report['killed_at']} and resumed from step "
            f"{report['restored']},\nthe run differs at step {report['compared_at']} from one that was not "
            "killed:"
        )
        experiment.print_rows(report["differences"])
    elif report["exact"]:
        print(
            f"Resuming is exact: killed after step {report['killed_at']} and resumed from step "
            f"{report['restored']},\nthe run is the same at step {report['compared_at']}, bit for bit: "
            f"{plural(report['num_compared'], 'tensor')} and values compared."
        )
    if report["causes"]:
        print("\nProbable causes:" if report["differences"] else "\nNot everything is restored:")
        for cause in report["causes"]:
            print(textwrap.fill(cause, 80, initial_indent="- ", subsequent_indent="  "))
