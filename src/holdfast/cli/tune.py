"""`holdfast tune`: profiles a training script and reports what would speed it up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.commands import argument, command, count, script_arguments
from holdfast.cli.homes import nearest_hint
from holdfast.cli.tables import Column, print_json, print_table
from holdfast.errors import InvalidInput
from holdfast.system.units import format_bytes, format_duration, parse_bytes, parse_duration

if TYPE_CHECKING:
    from holdfast.train.tuning.findings import Finding, TuningReport
    from holdfast.train.tuning.measurements import CompileVerdict

_QUESTIONS = ("syncs", "compile", "shapes", "batch", "input")


@command(
    "tune",
    """
    holdfast tune train.py --epochs 1
    holdfast tune --only compile,batch train.py
    holdfast tune --ranks 2 --json train.py | jq '.findings[] | [.kind, .place.line]'
    """,
    argument("--only QUESTIONS", f"comma-separated questions from {','.join(_QUESTIONS)} (default: all)"),
    argument("--steps N", "steps to measure in each run", count, default=10),
    argument(
        "--ranks N", "number of processes to start, as torchrun does (default: one plain process)", count
    ),
    argument("--memory SIZE", "memory limit for larger batches, such as 12GiB (default: free memory)"),
    argument("--timeout TIME", "time limit of each run", default="10m"),
    argument("--debug", "keep all logs, including torch's logs of every compilation"),
    *script_arguments("training script"),
)
def run(args: argparse.Namespace) -> int:
    """Profile the script, and print the report."""
    questions = tuple(filter(None, (args.only or ",".join(_QUESTIONS)).split(",")))
    if unknown := set(questions) - set(_QUESTIONS):
        raise InvalidInput(
            f"--only {args.only}: unknown question {min(unknown)!r}. Choose from {', '.join(_QUESTIONS)}."
        )
    if not Path(args.script).is_file():
        raise InvalidInput(
            f"The script {args.script!r} does not exist. {nearest_hint(args.script)} Pass the Python "
            "file that trains, then its arguments."
        )
    from holdfast.train.tuning.script_profile import profile_script  # slow, and needed only here

    report = profile_script(
        args.script,
        args.args,
        questions=questions,
        ranks=args.ranks,
        num_steps=args.steps,
        memory_bytes=None if args.memory is None else parse_bytes(args.memory, "--memory"),
        timeout_s=parse_duration(args.timeout, "--timeout"),
        debug=args.debug,
        on_progress=lambda what: print(f"holdfast: {what} ...", file=sys.stderr),
    )
    if args.json:
        print_json(report.as_json())
    else:
        _print(report)
    return 0


def _print(report: TuningReport) -> None:
    from holdfast.train.tuning.source_lines import format_line

    now = report.throughput
    waiting = f", {now.wait_share:.0%} of it waiting for data" if report.steps.loader is not None else ""
    print(f"{report.script} on {report.steps.device}: a step takes {format_duration(now.step_s)}{waiting}.")
    if report.findings:
        print()
        columns = (
            Column("#", itemgetter(0), "right"),
            Column("KIND", lambda row: row[1].kind),
            Column("WHERE", lambda row: format_line(row[1].place), "name"),
            Column("COSTS", lambda row: row[1].costs),
            Column("AFTER THE CHANGE", lambda row: row[1].after, "text"),
        )
        print_table(columns, enumerate(report.findings, 1))
        for number, one in enumerate(report.findings, 1):
            _print_advice(number, one)
    else:
        print("No change found that speeds it up by more than the noise.")
    _print_compile(report)
    _print_batches(report)
    _print_paddings(report)
    for reason in report.unanswered:
        print(f"\nnot answered: {reason}")
    if report.logs:
        print(f"\nlogs of every run: {report.logs}")


def _print_advice(number: int, one: Finding) -> None:
    from holdfast.train.tuning.source_lines import format_line

    code = f"   {one.place.code}" if one.place is not None and one.place.code else ""
    print(f"\n{number}. {format_line(one.place)}{code}")
    print(f"   {one.seen}.")
    print(f"   {one.change}")


def _print_compile(report: TuningReport) -> None:
    from holdfast.train.tuning.findings import NAMES

    if not report.verdicts:
        return
    print("\nDoes torch.compile pay off?")
    columns = (
        Column("COMPILED", lambda one: NAMES[one.variant]),
        _measured("SPEED", lambda one: f"{one.speed_up:.2f}x"),
        _measured("NOISE", lambda one: f"{one.noise:.0%}", spare=2),
        _measured("WARM-UP", lambda one: format_duration(one.warm_up_s)),
        _measured("EARNED BACK", _earned_back),
        _measured("MEMORY OF A STEP", _memory, spare=1),
        Column("PAYS", lambda one: one.failure or _pays(one), "text"),
    )
    print_table(columns, report.verdicts)


def _measured(heading: str, cell: Callable[[Any], object], spare: int = 0) -> Column:
    """Return a column that is empty where a measurement has failed."""
    return Column(heading, lambda one: None if one.failure else cell(one), spare=spare)


def _earned_back(one: CompileVerdict) -> str:
    return "never" if one.break_even_steps is None else f"{one.break_even_steps} steps"


def _memory(one: CompileVerdict) -> str | None:
    return None if one.memory_ratio is None else f"{one.memory_ratio:.2f}x"


def _pays(one: CompileVerdict) -> str:
    return "yes" if one.pays else "no, slower" if one.costs else "no, as fast"


def _print_batches(report: TuningReport) -> None:
    if len(report.batches) < 2:
        return
    print("\nBatches:")
    first = report.batches[0]
    columns = (
        Column("BATCH", lambda one: one.value, "right"),
        _measured("SAMPLES/S", lambda one: f"{one.items_per_s / first.items_per_s:.2f}x"),
        _measured("MEMORY", lambda one: None if one.peak_bytes is None else format_bytes(one.peak_bytes)),
        Column("", lambda one: one.failure or ("now" if one is first else ""), "text"),
    )
    print_table(columns, report.batches)


def _print_paddings(report: TuningReport) -> None:
    found = report.paddings
    if found is None:
        return
    print("\nPaddings of these batches:")
    rows = [("current", f"{found.useful:.0%}", str(found.num_shapes), "1.00x")]
    rows += [
        (one.name, f"{one.useful:.0%}", str(one.num_shapes), f"{one.positions / found.now:.2f}x")
        for one in found.others
    ]
    headings = ("PADDING", "USEFUL", "SHAPES", "COST")
    columns = [Column(name, itemgetter(i), "right" if i else "name") for i, name in enumerate(headings)]
    print_table(columns, rows)
