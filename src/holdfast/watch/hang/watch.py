"""Watch of hangs: the limits of time without progress, and a keeper's thread that records all stacks."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from msgspec import Struct
from typing_extensions import override

from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.keeper.lockfile import is_trainer_alive
from holdfast.checkpoint.keeper.pulse import PulseReader, TrainerProgress
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatch
from holdfast.checkpoint.watch import ActionWatch, WatchedRun
from holdfast.errors import Corrupt, HoldfastError
from holdfast.system.documents import to_plain
from holdfast.system.environment import MAX_PLACE, JobReport, report_to_job
from holdfast.system.units import Duration, parse_duration
from holdfast.watch.hang import incidents
from holdfast.watch.hang.incidents import RankEvidence
from holdfast.watch.hang.stacks import EXIT_SIGNAL, NAME, Kind, end_process, install_handlers


@dataclass
class Hang(ActionWatch):
    """Response to a training that makes no progress, and the limits of that.

    Args:
        action: "report" the stacks of all ranks; "restart": also end all ranks once their saves are durable,
            with status 63, so that a launcher starts them again; "off" to watch nothing.
        limit: longest step, such as "5m"; by default learnt from the steps before: ten times their median,
            twice the longest, and at least a minute.
        first: longest first step of a loop, which compiles and connects, and any step until the limit is
            learnt.
        phase: longest phase, such as an evaluation, a restore or a save; or ten times the longest of
            its name.

    Raises:
        InvalidInput: a value cannot be used.
    """

    name: ClassVar[str] = NAME
    keeper: ClassVar[str | None] = "holdfast.watch.hang.watch:HangKeeper"
    events: ClassVar[Mapping[str, str]] = {
        incidents.EVENT: "a rank makes no progress; with the member `evidence`",
        incidents.OVER: "the rank makes progress again; seconds are those without",
    }

    actions: ClassVar[tuple[str, ...]] = ("report", "restart", "off")
    action: str = "report"
    _: KW_ONLY
    limit: Duration | None = None
    first: Duration = "30m"
    phase: Duration = "30m"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._limits = HangLimits(
            None if self.limit is None else parse_duration(self.limit, "Hang(limit=)"),
            parse_duration(self.first, "Hang(first=)"),
            parse_duration(self.phase, "Hang(phase=)"),
        )

    @override
    def options(self) -> Mapping[str, Any]:
        return {"restarts": self.action == "restart", "limits": to_plain(self._limits)}

    @override
    def begin(self, run: WatchedRun) -> None:
        run.words[0] = install_handlers() + 1


MIN_LIMIT_S = 60.0
"""Shortest limit that is learnt: a slow disk or a busy network may delay any step for so long."""
TIMES_MEDIAN = 10.0  # the limit, as a multiple of the median duration of the last steps
TIMES_LONGEST = 2.0
"""The least limit, as a multiple of the longest of the last steps: such as one with an evaluation."""
MIN_STEPS = 10  # steps after which a limit is learnt
_MAX_TICK_S = 2.0
"""Longest time that one tick counts: a suspended machine makes no progress, and does not hang."""


class HangLimits(Struct, frozen=True):
    """Limits of the times without progress, in seconds."""

    step_s: float | None = None  # of a step; None to learn it
    first_s: float = 1800.0  # of the first step of a loop, and of all until the limit is learnt
    phase_s: float = 1800.0
    """Of a phase, such as an evaluation or a restore, or ten times the longest of its name before."""


def learn_limit(durations_s: tuple[float, ...]) -> float | None:
    """Return the limit of a step in seconds; None for too few durations."""
    if len(durations_s) < MIN_STEPS:
        return None
    median_s, longest_s = statistics.median(durations_s), max(durations_s)
    return max(MIN_LIMIT_S, TIMES_MEDIAN * median_s, TIMES_LONGEST * longest_s)


class StallClock:
    """Clock of the time since a trainer has made progress.

    It adds up the ticks of its caller, so that neither a suspended machine nor a delayed caller counts.
    """

    def __init__(self, limits: HangLimits) -> None:
        self.stalled_s = 0.0  # time without progress
        self.limit_s = limits.first_s  # of what the trainer is doing
        self._limits = limits
        self._seen: tuple[int, int, int] | None = None
        self._least_limit_s = 0.0
        self._phase = ""
        self._longest_s: dict[str, float] = {}

    def tick(self, progress: TrainerProgress, passed_s: float) -> bool:
        """Add a tick. Return True if the trainer has made no progress for longer than its limit."""
        seen = progress.beats, progress.beats_here, progress.phase_count
        if seen != self._seen:
            if self._phase:
                self._longest_s[self._phase] = max(self._longest_s.get(self._phase, 0.0), self.stalled_s)
            self._seen, self._phase = seen, progress.phase
            self.stalled_s = self._least_limit_s = 0.0
        elif progress.is_training:
            self.stalled_s += min(passed_s, _MAX_TICK_S)
        self.limit_s = max(self._limit(progress), self._least_limit_s)
        return progress.is_training and self.stalled_s > self.limit_s

    def extend(self, limit_s: float) -> None:
        """Give what the trainer is doing a longer limit."""
        self._least_limit_s = limit_s

    def _limit(self, progress: TrainerProgress) -> float:
        limits = self._limits
        if progress.phase:
            return max(limits.phase_s, TIMES_MEDIAN * self._longest_s.get(progress.phase, 0.0))
        if progress.beats_here < 1:
            return limits.first_s
        if limits.step_s is not None:
            return limits.step_s
        return learn_limit(progress.durations_s) or limits.first_s


_PERIOD_S = 1.0  # longest pause between two looks at the pulse
_LOOKS = 10  # looks within the limit of a step, if that is short
_GATHER_S = 10.0  # time to wait for the evidence of ranks on other hosts
_RECORD_S = 10.0  # time to wait for the history before what was found is printed and done without it
_SAVES_S = 60.0  # time to wait for saves under way before a trainer that hangs is ended
_LEAD_S = 5.0  # lead of the keeper that reports, before the other trainers of its host are ended
_EXIT_S = 5.0
_SHOW_S = 3.0  # time that a trainer may take to print a text
_UNLIMITED_S = 1e9


class HangKeeper(KeeperWatch):
    """Thread that watches the pulse of a keeper's trainer."""

    @override
    def start(self, run: KeeperRun) -> None:
        self._config, self._trainer, self._history = run.config, run.trainer, run.history
        self._run, self._restarts = run, bool(self.options["restarts"])
        self._limits = HangLimits(**self.options["limits"])
        self._clock = StallClock(self._limits)
        self._reported: tuple[int, int] | None = None  # progress at which a hang was reported
        self._reported_s = 0.0
        run.in_background(self._watch)

    def _watch(self) -> None:
        try:
            pulse = PulseReader.of_process(self._trainer.trainer_pid, self._trainer.pulse_fd)
        except (OSError, Corrupt):
            return  # the trainer has exited already
        step_s = self._limits.step_s
        period_s = _PERIOD_S if step_s is None else min(_PERIOD_S, step_s / _LOOKS)
        seen_s = time.monotonic()
        while is_trainer_alive(self._trainer):
            time.sleep(period_s)
            progress, now_s = pulse.read(), time.monotonic()
            is_late = self._clock.tick(progress, now_s - seen_s)
            seen_s = now_s
            if self._has_recovered(progress):
                self._reported = None
                if progress.is_training:  # otherwise it has left its loop, as after a signal
                    seconds, detail = now_s - self._reported_s, "the training makes progress again"
                    self._history.record(incidents.OVER, step=progress.step, seconds=seconds, detail=detail)
            if is_late and self._reported is None:
                self._handle(progress)
                seen_s = time.monotonic()

    def _has_recovered(self, progress: TrainerProgress) -> bool:
        """Return True if the trainer has made progress since its hang was reported."""
        return self._reported not in (None, (progress.beats, progress.phase_count))

    def _handle(self, progress: TrainerProgress) -> None:
        """Capture all ranks of this host, and report a hang unless one may take long."""
        clock = self._clock
        own = incidents.capture_rank(
            self._trainer, progress, stalled_s=clock.stalled_s, limit_s=clock.limit_s
        )
        config, peers = self._config, list[RankEvidence]()
        with contextlib.suppress(HoldfastError):
            found_here = incidents.capture_host(config.home, attempt=config.attempt, without=config.rank)
            peers = list(found_here.values())
        if (limit_s := self._longer_limit([own, *peers], progress)) is not None:
            self._clock.extend(limit_s)
            return
        self._reported = progress.beats, progress.phase_count
        self._reported_s = time.monotonic() - self._clock.stalled_s
        recording = self._run.in_background(lambda: self._record(own))
        late = [one.rank for one in peers if one.stalled_s >= own.stalled_s / 2 and not one.phase]
        is_first = own.rank <= min(late, default=own.rank)  # the lowest one reports for all of the host
        found = self._report(own, peers) if is_first else [own]
        recording.join(_RECORD_S)
        if self._restarts:
            if not is_first:  # the job takes the first place that is reported
                time.sleep(_LEAD_S if self._config.all_ranks_here else _LEAD_S + _GATHER_S)
            with contextlib.suppress(OSError, Corrupt):  # it has exited
                self._end_trainer(own.step, incidents.describe_odd(found))

    def _longer_limit(self, ranks: Sequence[RankEvidence], progress: TrainerProgress) -> float | None:
        """Return a longer limit if a rank of this host does what may take long; None if none does."""
        limits, places = self._limits, [incidents.place_of(one.process, one.thread) for one in ranks]
        kinds = {place.kind for place in places if place is not None}
        if Kind.DEBUGS in kinds or any(one.process.state == "stopped by a debugger" for one in ranks):
            return _UNLIMITED_S
        may_take_long = kinds & {Kind.COMPILES, Kind.EVALUATES} or any(one.phase for one in ranks)
        is_extended = progress.phase or self._clock.limit_s >= limits.phase_s
        return limits.phase_s if may_take_long and not is_extended else None

    def _record(self, evidence: RankEvidence) -> None:
        self._history.record(
            incidents.EVENT,
            step=evidence.step,
            seconds=evidence.stalled_s,
            detail=incidents.describe_odd([evidence]),
            members={"evidence": incidents.encode_evidence(evidence)},
        )
        with contextlib.suppress(HoldfastError):
            self._history.store.flush()

    def _report(self, own: RankEvidence, peers: Sequence[RankEvidence]) -> list[RankEvidence]:
        """Print one block about all ranks, with what other hosts have recorded. Return the evidence."""
        found = {one.rank: one for one in (*peers, own)}
        if len(found) < self._config.world_size:
            gathering = self._run.in_background(lambda: self._gather(found))
            gathering.join(_GATHER_S + _RECORD_S)
        if 0 in found and own.rank != 0 and found[0].is_late:
            return list(found.values())  # rank 0's keeper reports
        found = dict(found)
        for peer in peers:
            if peer.phase or peer.stalled_s < own.stalled_s / 2:  # its own keeper does not
                self._run.in_background(lambda peer=peer: self._record(peer))
        ranks = [found[rank] for rank in sorted(found)]
        action = 'Nothing was done (Hang("report")).'
        if self._restarts:
            action = "The trainers are ended, so that the job starts again."
        config = self._config
        text = incidents.describe_hang(ranks, world_size=config.world_size, action=action, home=config.home)
        if not self._run.show(text, wait_s=_SHOW_S):  # it is stopped, or something holds the GIL
            _print_to(self._trainer.trainer_pid, f"holdfast: {text}\n")
        return ranks

    def _gather(self, found: dict[int, RankEvidence]) -> None:
        """Add the evidence that other ranks record about the same hang, for a limited time."""
        deadline_s = time.monotonic() + _GATHER_S
        since_unix_s = time.time() - 2 * self._clock.stalled_s
        while time.monotonic() < deadline_s and len(found) < self._config.world_size:
            with contextlib.suppress(HoldfastError):
                for line in read_lines(self._history.store, self._config.attempt)[0]:
                    other = incidents.decode_evidence(line) if line["t"] >= since_unix_s else None
                    if other is not None and not (other.rank in found and found[other.rank].is_late):
                        found[other.rank] = other
            time.sleep(_PERIOD_S)

    def _end_trainer(self, step: int, place: str) -> None:
        """End the trainer once its saves are durable, unless it makes progress again."""
        deadline_s = time.monotonic() + _SAVES_S
        while self._run.has_work() and time.monotonic() < deadline_s:
            time.sleep(_PERIOD_S / _LOOKS)
        if self._has_recovered(incidents.read_progress(self._trainer)):
            return
        report_to_job(JobReport(hung=step, place=place[:MAX_PLACE]))
        recording = self._run.in_background(
            lambda: self._history.record("ended", step=step, detail=f"hung ({place})")
        )
        recording.join(_RECORD_S)
        if is_trainer_alive(self._trainer):
            end_process(self._trainer.trainer_pid, EXIT_SIGNAL, limit_s=_EXIT_S)


def _print_to(pid: int, text: str) -> None:
    """Write text to the stderr of another process, if that can be done without waiting.

    In a file that was not opened for appending, the process may overwrite it later.
    """
    with contextlib.suppress(OSError):
        fd = os.open(
            f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        )
        try:
            os.write(fd, text.encode(errors="replace"))
        finally:
            os.close(fd)
