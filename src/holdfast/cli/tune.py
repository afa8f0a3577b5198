"""`holdfast tune`: profiles a training script and reports what would speed it up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.homes import nearest_hint
from holdfast.cli.options import Commands, add_json, command, count
from holdfast.cli.tables import print_json, print_table
from holdfast.errors import InvalidInput
from holdfast.system.units import format_bytes, format_duration, parse_bytes, parse_duration

if TYPE_CHECKING:
    from holdfast.train.tuning.findings import Finding, TuningReport

_EXAMPLES = """
holdfast tune train.py --epochs 1
holdfast tune --only compile,batch train.py
holdfast tune --ranks 2 --json train.py | jq '.findings[] | [.kind, .place.line]'
"""
_QUESTIONS = ("syncs", "compile", "shapes", "batch", "input")


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "tune", run, examples=_EXAMPLES)
    parser.add_argument(
        "--only",
        metavar="QUESTIONS",
        help=f"comma-separated questions from {','.join(_QUESTIONS)} (default: all)",
    )
    parser.add_argument(
        "--steps", type=count, default=10, metavar="N", help="steps to measure in each run (default: 10)"
    )
    parser.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="number of processes to start, as torchrun does (default: one plain process)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory limit for larger batches, such as 12GiB (default: free memory)",
    )
    parser.add_argument(
        "--timeout", default="10m", metavar="TIME", help="time limit of each run (default: 10m)"
    )
    parser.add_argument(
        "--debug", action="store_true", help="keep all logs, including torch's logs of every compilation"
    )
    add_json(parser)
    parser.add_argument("script", metavar="SCRIPT", help="training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")


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
        columns = ("#", "KIND", "WHERE", "COSTS", "AFTER THE CHANGE")
        rows = [
            (str(number), one.kind, format_line(one.place), one.costs, one.after)
            for number, one in enumerate(report.findings, 1)
        ]
        print_table(columns, rows, right=("#",), names=("WHERE",), text="AFTER THE CHANGE")
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
    rows = []
    for one in report.verdicts:
        if one.failure:
            rows.append((NAMES[one.variant], "-", "-", "-", "-", one.failure))
            continue
        even = "never" if one.break_even_steps is None else f"{one.break_even_steps} steps"
        memory = "-" if one.memory_ratio is None else f"{one.memory_ratio:.2f}x"
        answer = "yes" if one.pays else "no, slower" if one.costs else "no, as fast"
        cells = (
            f"{one.speed_up:.2f}x",
            f"{one.noise:.0%}",
            format_duration(one.warm_up_s),
            even,
            memory,
            answer,
        )
        rows.append((NAMES[one.variant], *cells[:3], f"{even}", cells[4], answer))
    print("\nDoes torch.compile pay off?")
    columns = ("COMPILED", "SPEED", "NOISE", "WARM-UP", "EARNED BACK", "MEMORY OF A STEP", "PAYS")
    cells = [row if len(row) == 7 else (*row[:5], "-", row[5]) for row in rows]
    print_table(columns, cells, text="PAYS", spare=("MEMORY OF A STEP", "NOISE"))


def _print_batches(report: TuningReport) -> None:
    if len(report.batches) < 2:
        return
    print("\nBatches:")
    first = report.batches[0]
    rows = [
        (
            str(one.value),
            "-" if one.failure else f"{one.items_per_s / first.items_per_s:.2f}x",
            "-" if one.failure or one.peak_bytes is None else format_bytes(one.peak_bytes),
            one.failure or ("now" if one is first else ""),
        )
        for one in report.batches
    ]
    print_table(("BATCH", "SAMPLES/S", "MEMORY", ""), rows, right=("BATCH",), text="")


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
    print_table(
        ("PADDING", "USEFUL", "SHAPES", "COST"), rows, right=("USEFUL", "SHAPES", "COST"), names=("PADDING",)
    )
