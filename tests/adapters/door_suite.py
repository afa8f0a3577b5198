"""Promises of every door to a trainer, over a training script of the door: its tests are a subclass."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import holdfast
from adapters import running

Plan = dict[str, Any]
SIGTERM, PREEMPTED, KILLED = 15, 75, -9


class DoorSuite:
    """Trainings that are killed or preempted, and end as an unbroken one of the trainer without Holdfast.

    Attributes:
        script: script, which takes the folder and the plan as JSON, and prints the end of the run.
        unbroken: plan of a run without Holdfast.
        resume: value of the plan that resumes, also where nothing was saved yet.
        home: name of the home in the folder of a run.
        killed: plan and place of the kill, see `kills`, by the name of the case.
        of_ranks: plan, place and rank of the kill, on two ranks.
        preempted: plan and step of the notice, which is saved.
        ended: plan and step of a kill after the last save.
        again: plan, steps between two kills, and last step of a kill.
        agreed: plan in which rank 1 of two gets a notice.
    """

    script: ClassVar[Path]
    unbroken: ClassVar[Plan] = {"stock": True}
    resume: ClassVar[Any] = True
    home: ClassVar[str] = "holdfast"
    killed: ClassVar[Mapping[str, Any]]
    of_ranks: ClassVar[Mapping[str, tuple[Plan, Any, int]]]
    preempted: ClassVar[Mapping[str, tuple[Plan, int]]]
    ended: ClassVar[Mapping[str, tuple[Plan, int]]]
    again: ClassVar[tuple[Plan, tuple[int, int], int]]
    agreed: ClassVar[Plan]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test for the cases of its table."""
        for name in {"killed", "of_ranks", "preempted", "ended"} & {*metafunc.fixturenames}:
            rows: Mapping[str, Any] = getattr(self, name)
            metafunc.parametrize(name, list(rows.values()), ids=list(rows))

    def train(self, folder: Path, count: int = 1, *, status: int = 0, **plan: Any) -> list[dict[str, Any]]:
        """Train on ranks of one process group, and return the end of the run by rank."""
        victims = [plan.get("rank", 0)] if status == KILLED else range(count)
        statuses = [status if rank in victims else 0 for rank in range(count)]
        return running.train_ranks(self.script, folder, count, statuses=statuses, **plan)

    def compare(self, resumed: list[dict[str, Any]], unbroken: list[dict[str, Any]]) -> None:
        """Compare the end of a resumed run with that of an unbroken one."""
        assert resumed == unbroken

    def check(
        self, folder: Path, plan: Plan, *breaks: Plan, count: int = 1, saved: int | None = None
    ) -> list[dict[str, Any]]:
        """Train in starts that end early, and once to the end; return the end of an unbroken run."""
        unbroken = self.train(folder / "unbroken", count, **{**plan, **self.unbroken})
        for number, one in enumerate(breaks):
            resume = {"resume": self.resume} if number else {}
            self.train(folder / "out", count, **plan, **resume, **one)
        if saved is not None:
            assert holdfast.open(folder / "out" / self.home).step == saved
        self.compare(self.train(folder / "out", count, resume=self.resume, **plan), unbroken)
        return unbroken

    @abstractmethod
    def step_of(self, end: dict[str, Any]) -> int:
        """Return the step at the end of a run."""

    def kills(self, place: Any) -> list[Plan]:
        """Return the plan of each start that ends by a kill: by default of one, at a step."""
        return [{"status": KILLED, "kill_at": place}]

    def test_a_killed_run_resumes_bit_for_bit(self, tmp_path: Path, killed: tuple[Plan, Any]) -> None:
        plan, place = killed
        self.check(tmp_path, plan, *self.kills(place))

    @pytest.mark.ranks
    def test_two_ranks_resume_bit_for_bit(self, tmp_path: Path, of_ranks: tuple[Plan, Any, int]) -> None:
        plan, place, victim = of_ranks
        self.check(tmp_path, plan, *({**one, "rank": victim} for one in self.kills(place)), count=2)

    def test_a_run_that_is_killed_again_and_again_resumes_bit_for_bit(self, tmp_path: Path) -> None:
        plan, distance, last = self.again
        draw, steps = random.Random(5), [0]
        while steps[-1] < last:
            steps.append(steps[-1] + draw.randint(*distance))
        self.check(tmp_path, plan, *({"status": KILLED, "kill_at": step} for step in steps[1:]))

    def test_a_run_killed_after_its_last_save_trains_no_further_step(
        self, tmp_path: Path, ended: tuple[Plan, int]
    ) -> None:
        plan, step = ended
        unbroken = self.check(tmp_path, plan, {"status": KILLED, "kill_at": step, "is_saved": True})
        assert [self.step_of(end) for end in unbroken] == [step]

    def test_a_preempted_run_exits_with_75_and_resumes_bit_for_bit(
        self, tmp_path: Path, preempted: tuple[Plan, int]
    ) -> None:
        plan, step = preempted
        stop = {"status": PREEMPTED, "kill_at": step, "signal": SIGTERM}
        self.check(tmp_path, plan, stop, saved=step)

    @pytest.mark.ranks
    def test_two_ranks_agree_on_a_notice_that_one_of_them_gets(self, tmp_path: Path) -> None:
        stop = {"status": PREEMPTED, "kill_at": 9, "signal": SIGTERM, "rank": 1}
        self.check(tmp_path, self.agreed, stop, count=2)
