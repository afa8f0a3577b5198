"""What a report says first: how the run stands, in a sentence and in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.report.look import moment, seconds, share, size
from holdfast.report.story import Story


@dataclass(frozen=True, slots=True)
class Number:
    """One number with what it is, and what else should be known about it."""

    name: str
    value: str
    remark: str = ""


def sentence(story: Story) -> str:
    """How the run stands."""
    if story.last_unix_s is None:
        return "Nothing has happened in this run yet."
    last = moment(story.last_unix_s)
    if story.finished is not None:
        done = moment(story.finished.finished_unix_s)
        return f"Finished: step {story.finished.step}, by attempt {story.finished.attempt}, {done} UTC."
    newest = max(story.lives, key=lambda life: (life.last_seen_unix_s, life.number))
    told = f"Not marked as finished. Last sign of life: {last} UTC"
    if newest.last_seen_unix_s > story.last_unix_s:
        return f"{told}. Attempt {newest.number}, begun later, has told of nothing yet."
    return f"{told}, attempt {newest.number}."


def numbers(story: Story) -> list[Number]:
    """The few numbers that matter most, in the order of reading."""
    times, advice = story.times, story.advice
    durable = [save for save in story.saves if save.durable]
    whole_s = times.total_s - times.idle_s
    lost_steps = sum(one.steps_lost for one in story.interruptions)
    num_failed = len(story.saves) - len(durable)
    newest = max(durable, key=lambda save: (save.attempt, save.step), default=None)
    step = story.holding.newest_step if story.holding else newest.step if newest else None
    return [
        Number("Newest checkpoint", "none" if step is None else f"step {step}", _held(story)),
        Number(
            "Training that counts",
            share(times.kept_s / whole_s) if whole_s > 0 else "-",
            f"of {seconds(whole_s)} since the first start",
        ),
        Number(
            "Saving overhead",
            share(story.overhead_share),
            f"of training time spent in save(); {seconds(advice.cost_s)} a save",
        ),
        Number(
            "Lost to interruptions",
            seconds(times.lost_s) if story.interruptions else "nothing",
            f"{_count(len(story.interruptions), 'interruption')}; {lost_steps} steps known to be done again",
        ),
        Number(
            "Saves",
            str(len(story.saves)),
            f"{len(durable)} durable"
            + (f", {num_failed} not" if num_failed else "")
            + (f"; {size(newest.num_bytes)} each" if newest else "")
            + (f", {seconds(advice.durable_s)} until durable" if advice.durable_s is not None else ""),
        ),
        Number("Best interval", *_best(story)),
        *_tear_check(story),
    ]


def _tear_check(story: Story) -> list[Number]:
    """Return by which means the newest attempt that recorded it found torn copies."""
    told = [life.tear_check for life in story.lives if life.tear_check]
    return [Number("Torn copies", "are found by " + told[-1])] if told else []


def _held(story: Story) -> str:
    if story.holding is None:
        return ""
    if not story.holding.num_checkpoints:
        return "home holds no checkpoint"
    many = _count(story.holding.num_checkpoints, "checkpoint")
    return f"home holds {many}, {size(story.holding.num_bytes)}"


def _best(story: Story) -> tuple[str, str]:
    advice = story.advice
    was = f"it saved every {seconds(advice.interval_s)}" if advice.interval_s else "it saved once at most"
    if advice.own is None or advice.useful_s is None:
        return "not known", f"no failure yet; {was}"
    in_steps = f"{_count(max(1, round(advice.useful_s / advice.step_s)), 'step')}; " if advice.step_s else ""
    how = "by Daly" if advice.useful_s == advice.own.daly_s else "the time until a save is durable"
    failures = _count(advice.num_failures, "failure")
    return seconds(advice.useful_s), f"{in_steps}{how}, from {failures}; {was}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
