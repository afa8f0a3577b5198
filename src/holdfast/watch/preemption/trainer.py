"""Watch of preemption notices: the run saves and stops before its machine is taken away."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from typing_extensions import override

from holdfast.checkpoint.watch import Act, Vote, Watch, WatchedRun
from holdfast.watch.preemption.loader_workers import protect_workers
from holdfast.watch.preemption.sources import parse_sources
from holdfast.watch.preemption.watcher import NoticeWatcher


@dataclass
class Preemption(Watch):
    """Sources of preemption notices.

    Args:
        sources: "aws", "gcp", "azure", "ray", "slurm", "deadline=11h", "file:PATH", several with commas,
            "none", or "auto" for Ray Train in its workers, else the cloud of this machine, and the time limit
            of a Slurm job. By default the value of HOLDFAST_PREEMPTION, else "auto".
        signals: take SIGTERM, SIGUSR1, SIGHUP and SIGINT as notices (in the main thread only), from the first
            call of `steps`, `step_done` or `should_save` on.

    Raises:
        InvalidInput: a source does not exist.
    """

    name: ClassVar[str] = "preemption"

    sources: str | None = None
    _: KW_ONLY
    signals: bool = True

    def __post_init__(self) -> None:
        parse_sources(self.sources)

    @override
    def begin(self, run: WatchedRun) -> None:
        self._run, self._notices = run, NoticeWatcher(self.sources)
        if self.signals:
            protect_workers()  # before a loop begins: it may read from iterators made earlier
        self._notices.poll_clouds(is_first_here=run.is_first_here)

    @override
    def loop_began(self) -> None:
        if self.signals:
            self._notices.watch_signals()

    @override
    def loop_ended(self) -> None:
        self._notices.release_signals()

    @override
    def step(self, step: int) -> Vote | None:
        self._notices.expect_save(self._run.save_s())
        rebalance = self._notices.pop_rebalance()
        if rebalance is not None and self._notices.reason is None:
            return Vote(Act.SAVE, rebalance.reason)
        return self.waiting()

    @override
    def waiting(self) -> Vote | None:
        reason = self._notices.reason
        return None if reason is None else Vote(Act.STOP, reason)

    @override
    def end(self, timeout_s: float | None) -> None:
        self._notices.close()
