"""`holdfast replay`: runs recorded steps of a training again, and compares the result with its checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.checkpoint.exchange.home_copy import copy_checkpoint
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.factory import absolute_place
from holdfast.cli import TROUBLE
from holdfast.cli.homes import open_home
from holdfast.cli.options import Commands, add_home, add_json, command, step_number
from holdfast.cli.replay.span import RecordedSpan, find_span, recorded_metrics
from holdfast.cli.replay.verdict import (
    DIFFERS,
    RANDOM,
    SOUND,
    MetricDifference,
    ReplayVerdict,
    first_difference,
    judge,
)
from holdfast.cli.tables import print_json
from holdfast.cli.trials.comparison import CheckpointComparison, compare_sides, open_side, print_rows
from holdfast.cli.trials.runs import Trials, script_words, show_progress, trial_folder
from holdfast.cli.trials.traces import Trace
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.environment import place_in_sandbox
from holdfast.system.units import parse_duration, plural

_EXAMPLES = """
holdfast replay runs/gpt train.py --lr 0.1
holdfast replay runs/gpt --step 500 train.py
holdfast replay s3://bucket/gpt --step 500 --to 1500 -- torchrun --nproc-per-node 2 train.py
"""
_STATUS = {SOUND: 0, DIFFERS: 1, RANDOM: 3}
"""Exit status of each verdict."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = (
        "The script runs in a sandbox, and HOME is only read. The exit status is 0 if the result equals the "
        "record, 1 if it differs, and 3 if the training is not deterministic here."
    )
    parser = command(commands, "replay", run, details=details, examples=_EXAMPLES)
    add_home(parser)
    parser.add_argument(
        "--step", type=step_number, metavar="N", help="step to start from (default: the one before --to)"
    )
    parser.add_argument(
        "--to", type=step_number, metavar="M", help="step to compare (default: the next saved, or the newest)"
    )
    parser.add_argument(
        "--timeout", default="1h", metavar="TIME", help="time limit of each of up to 2 runs (default: 1h)"
    )
    parser.add_argument("--keep", metavar="DIR", help="copy the sandbox of the runs to this folder")
    add_json(parser)
    parser.add_argument("script", metavar="SCRIPT", help="training script, or any command")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    """Replay the steps, and print the verdict."""
    words = script_words(args.script, args.args)
    timeout_s = parse_duration(args.timeout, "--timeout")
    store, _ = open_home(args.home)
    span = find_span(store, step=args.step, to_step=args.to)
    try:
        with trial_folder("replay", args.keep) as folder:
            trials = Trials(words, folder, timeout_s=timeout_s, on_progress=show_progress)
            report = _Replay(store, absolute_place(args.home), span, trials).report()
    except Corrupt as error:  # 1 would mean that the replay differs
        print(f"holdfast: {error}", file=sys.stderr)
        return TROUBLE
    if args.json:
        print_json(report)
    else:
        _print(report)
    return _STATUS[report["verdict"]]


class _Replay:
    """Replay of a span: one run, and a second one if the first differs from the record."""

    def __init__(self, store: Store, place: str, span: RecordedSpan, trials: Trials) -> None:
        self._store, self._place, self._span, self._trials = store, place, span, trials

    def report(self) -> dict[str, Any]:
        """Run the steps again, and return everything that was found."""
        trace = self._run("first")
        record = self._compare_with_record("first")
        again = between = None
        if record.rows:
            self._run("second")
            again = self._compare_with_record("second")
            between = self._compare_runs()
        verdict = judge(record, again, between)
        metric = first_difference(recorded_metrics(self._store, self._span), _metrics_of(trace))
        return self._facts(verdict, record, None if verdict.name == SOUND else metric)

    def _facts(
        self, verdict: ReplayVerdict, record: CheckpointComparison, metric: MetricDifference | None
    ) -> dict[str, Any]:
        start, end = self._span.start, self._span.end
        return {
            "home": self._store.url,
            "step": start.step,
            "attempt": start.attempt,
            "to_step": end.step,
            "to_attempt": end.attempt,
            "world_size": end.world_size,
            "verdict": verdict.name,
            "matches_once": verdict.matches_once,
            "num_compared": record.num_compared,
            "differences": [asdict(row) for row in verdict.differences],
            "metric": None if metric is None else asdict(metric),
        }

    def _run(self, name: str) -> Trace:
        """Run the steps once, from a copy of the first checkpoint."""
        start, end = self._span.start, self._span.end
        home = self._home(name)
        home.mkdir(parents=True)
        copy_checkpoint(self._store, open_store(os.fspath(home)), start)
        what = f"{name} replay of steps {start.step} to {end.step}"
        show_progress(what)
        trace = self._trials.run(name, what, {"save_at": [end.step], "end_at": end.step})
        if trace.restored != start.step:
            raise InvalidInput(
                f"The script did not restore step {start.step}, but {trace.restored or 'nothing'}. It must "
                f"use the home {self._place}, restore, and train to step {end.step}. Give it the arguments "
                "that the run had."
            )
        return trace

    def _home(self, name: str) -> Path:
        return place_in_sandbox(self._trials.homes(name), self._place)

    def _compare_with_record(self, name: str) -> CheckpointComparison:
        end = self._span.end
        record = open_side(self._store.url, end.step, end.attempt)
        replayed = open_side(os.fspath(self._home(name)), end.step)
        if replayed.checkpoint.world_size != end.world_size:
            raise InvalidInput(
                f"The replay ran on {plural(replayed.checkpoint.world_size, 'rank')}, and the recorded steps "
                f"on {end.world_size}. Results depend on the number of ranks: start as many."
            )
        return compare_sides(record, replayed, of_a="the record", of_b="the replay")

    def _compare_runs(self) -> CheckpointComparison:
        sides = (open_side(os.fspath(self._home(name)), self._span.end.step) for name in ("first", "second"))
        return compare_sides(*sides, of_a="the first replay", of_b="the second replay")


def _metrics_of(trace: Trace) -> Mapping[int, Mapping[str, float]]:
    recorded = trace.records.get("0", {})
    return {step: {name: float(value) for name, value in values.items()} for step, values in recorded.items()}


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
    print_rows(report["differences"])
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
