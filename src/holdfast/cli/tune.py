"""`holdfast tune`: profiles a training script and reports what would speed it up."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli import print_note
from holdfast.cli.commands import argument, command, count, script_arguments
from holdfast.cli.homes import nearest_hint
from holdfast.cli.tables import Column, print_result, print_table
from holdfast.errors import InvalidInput
from holdfast.system.units import format_duration, parse_duration
from holdfast.train.tuning.measurements import NAMES, QUESTIONS, CompileVerdict
from holdfast.train.tuning.source_lines import format_line

if TYPE_CHECKING:
    from holdfast.train.tuning.findings import TuningReport


@command(
    "tune",
    """
    holdfast tune train.py --epochs 1
    holdfast tune --only compile,input train.py
    holdfast tune --ranks 2 --json train.py | jq '.findings[] | [.kind, .place.line]'
    """,
    argument("--only QUESTIONS", f"comma-separated questions from {','.join(QUESTIONS)} (default: all)"),
    argument("--steps N", "steps to measure in each run", count, default=10),
    argument(
        "--ranks N", "number of processes to start, as torchrun does (default: one plain process)", count
    ),
    argument("--timeout TIME", "time limit of each run", default="10m"),
    argument("--debug", "keep all logs, including torch's logs of every compilation"),
    *script_arguments("training script"),
)
def run(args: argparse.Namespace) -> None:
    """Profile the script, and print the report."""
    questions = tuple(filter(None, (args.only or ",".join(QUESTIONS)).split(",")))
    if unknown := set(questions) - set(QUESTIONS):
        raise InvalidInput(
            f"--only {args.only}: unknown question {min(unknown)!r}. Choose from {', '.join(QUESTIONS)}."
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
        timeout_s=parse_duration(args.timeout, "--timeout"),
        debug=args.debug,
        on_progress=lambda what: print_note(f"{what} ..."),
    )
    print_result(args, report.as_json(), lambda: _print(report))


def _print(report: TuningReport) -> None:
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
        for number, finding in enumerate(report.findings, 1):
            print(f"\n{number}. {format_line(finding.place, with_code=True)}")
            print(f"   {finding.seen}.\n   {finding.change}")
    else:
        print("No change found that speeds it up by more than the noise.")
    _print_compile(report)
    _print_paddings(report)
    for reason in report.unanswered:
        print(f"\nnot answered: {reason}")
    print("\nThe batch size that fits and is fast enough: `holdfast.fit_batch`.")
    if report.logs:
        print(f"\nlogs of every run: {report.logs}")


def _print_compile(report: TuningReport) -> None:
    if not report.verdicts:
        return
    print("\nDoes torch.compile pay off?")
    columns = (
        Column("COMPILED", lambda verdict: NAMES[verdict.variant]),
        _measured("SPEED", lambda verdict: f"{verdict.speed_up:.2f}x"),
        _measured("NOISE", lambda verdict: f"{verdict.noise:.0%}", spare=2),
        _measured("WARM-UP", lambda verdict: format_duration(verdict.warm_up_s)),
        _measured("EARNED BACK", _earned_back),
        _measured("MEMORY OF A STEP", lambda row: row.memory_ratio and f"{row.memory_ratio:.2f}x", spare=1),
        Column("PAYS", lambda verdict: verdict.failure or _pays(verdict), "text"),
    )
    print_table(columns, report.verdicts)


def _measured(heading: str, cell: Callable[[Any], object], spare: int = 0) -> Column:
    """Return a column that is empty where a measurement has failed."""
    return Column(heading, lambda row: None if row.failure else cell(row), spare=spare)


def _earned_back(verdict: CompileVerdict) -> str:
    return "never" if verdict.break_even_steps is None else f"{verdict.break_even_steps} steps"


def _pays(verdict: CompileVerdict) -> str:
    return "yes" if verdict.pays else "no, slower" if verdict.costs else "no, as fast"


def _print_paddings(report: TuningReport) -> None:
    found = report.paddings
    if found is None:
        return
    print("\nPaddings of these batches:")
    rows = [("current", found.useful, found.num_shapes, 1.0)]
    rows += [(row.name, row.useful, row.num_shapes, row.positions / found.now) for row in found.others]
    columns = (
        Column("PADDING", itemgetter(0), "name"),
        Column("USEFUL", lambda row: f"{row[1]:.0%}", "right"),
        Column("SHAPES", itemgetter(2), "right"),
        Column("COST", lambda row: f"{row[3]:.2f}x", "right"),
    )
    print_table(columns, rows)
