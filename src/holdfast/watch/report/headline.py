"""Headline of a report: the state of the run in one sentence and a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.system.units import plural
from holdfast.watch.report.style import format_seconds, format_share, format_size, format_time
from holdfast.watch.report.summary import RunSummary


@dataclass(frozen=True, slots=True)
class HeadlineNumber:
    """A number with its name and a remark."""

    name: str
    value: str
    remark: str = ""


def headline(summary: RunSummary) -> str:
    """Return the state of the run as a sentence."""
    if summary.last_unix_s is None:
        return "This run has no events yet."
    last = format_time(summary.last_unix_s)
    if summary.finished is not None:
        done = format_time(summary.finished.finished_unix_s)
        return f"Finished: step {summary.finished.step}, by attempt {summary.finished.attempt}, {done} UTC."
    newest = max(summary.attempts, key=lambda attempt: (attempt.last_seen_unix_s, attempt.number))
    text = f"Not marked as finished. Last event: {last} UTC"
    if newest.last_seen_unix_s > summary.last_unix_s:
        return f"{text}. Attempt {newest.number} started later and has no events yet."
    return f"{text}, attempt {newest.number}."


def headline_numbers(summary: RunSummary) -> list[HeadlineNumber]:
    """Return the most important numbers, in reading order."""
    times, advice = summary.times, summary.advice
    durable = [save for save in summary.saves if save.durable]
    whole_s = times.total_s - times.idle_s
    lost_steps = sum(one.steps_lost for one in summary.interruptions)
    num_failed = len(summary.saves) - len(durable)
    newest = max(durable, key=lambda save: save.checkpoint_id, default=None)
    step = summary.home_contents.newest_step if summary.home_contents else newest.step if newest else None
    return [
        HeadlineNumber("Newest checkpoint", "none" if step is None else f"step {step}", _held(summary)),
        HeadlineNumber(
            "Training that counts",
            format_share(times.kept_s / whole_s) if whole_s > 0 else "-",
            f"of {format_seconds(whole_s)} since the first start",
        ),
        HeadlineNumber(
            "Saving overhead",
            format_share(summary.overhead_share),
            f"of training time spent in save(); {format_seconds(advice.cost_s)} per save",
        ),
        HeadlineNumber(
            "Lost to interruptions",
            format_seconds(times.lost_s) if summary.interruptions else "nothing",
            f"{plural(len(summary.interruptions), 'interruption')}; {lost_steps} steps known to be repeated",
        ),
        HeadlineNumber(
            "Saves",
            str(len(summary.saves)),
            f"{len(durable)} durable"
            + (f", {num_failed} not" if num_failed else "")
            + (f"; {format_size(newest.num_bytes)} each" if newest else "")
            + (f", {format_seconds(advice.durable_s)} until durable" if advice.durable_s is not None else ""),
        ),
        HeadlineNumber("Best interval", *_best(summary)),
    ]


def tear_check(summary: RunSummary) -> str:
    """Return a sentence about the detection of torn copies, as last recorded."""
    methods = [attempt.tear_check for attempt in summary.attempts if attempt.tear_check]
    return f"Torn copies are detected by {methods[-1]}." if methods else ""


def _held(summary: RunSummary) -> str:
    if summary.home_contents is None:
        return ""
    if not summary.home_contents.num_checkpoints:
        return "home holds no checkpoint"
    many = plural(summary.home_contents.num_checkpoints, "checkpoint")
    return f"home holds {many}, {format_size(summary.home_contents.num_bytes)}"


def _best(summary: RunSummary) -> tuple[str, str]:
    advice = summary.advice
    was = f"actual: {format_seconds(advice.interval_s)}" if advice.interval_s else "at most one save"
    if advice.own is None or advice.useful_s is None:
        return "unknown", f"no failure yet; {was}"
    in_steps = f"{plural(max(1, round(advice.useful_s / advice.step_s)), 'step')}; " if advice.step_s else ""
    how = "by Daly's formula" if advice.useful_s == advice.own.daly_s else "the time until a save is durable"
    failures = plural(advice.num_failures, "failure")
    return format_seconds(advice.useful_s), f"{in_steps}{how}, from {failures}; {was}"
