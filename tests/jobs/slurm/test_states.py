"""What Slurm says and what a job's controller wrote down, taken together; and messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.jobs.machine import Life, Terms
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.slurm.commands import Queued
from holdfast.jobs.slurm.messages import (
    EndedNode,
    Here,
    Inbox,
    KillNode,
    Message,
    Noticed,
    Running,
    TellNode,
    ToldNode,
    write,
)
from holdfast.jobs.slurm.papers import Asked, Facts, Papers, Story
from holdfast.jobs.slurm.states import stand
from holdfast.jobs.status import Status

RAN = Life(Status.RUNNING, attempt=1, is_active=True)
DONE = Life(Status.SUCCEEDED, attempt=2)
MESSAGES: list[Message] = [
    Here(1),
    Running(0),
    Noticed(1, "Slurm (SIGUSR1)", 60.0),
    ToldNode(0, 2),
    EndedNode(1, "run", 75, None, False),
    TellNode("holdfast cancel", 1.5),
    KillNode(True),
]


@pytest.mark.parametrize(
    ("life", "state", "cancelled", "expected"),
    [
        (Life(), "PENDING", False, Status.PENDING),
        (Life(), "RUNNING", False, Status.STARTING),
        (Life(), "PENDING", True, Status.CANCELLING),
        (Life(), "CANCELLED", True, Status.CANCELLED),
        (Life(), "FAILED", False, Status.FAILED_CONTROLLER),
        (RAN, "RUNNING", False, Status.RUNNING),
        (RAN, "COMPLETING", False, Status.RUNNING),
        (RAN, "PENDING", False, Status.RECOVERING),
        (RAN, "PREEMPTED", False, Status.RECOVERING),
        (RAN, "NODE_FAIL", False, Status.RECOVERING),
        (RAN, "REQUEUE_HOLD", False, Status.RECOVERING),
        (RAN, "CANCELLED", False, Status.CANCELLED),
        (RAN, "CANCELLED by 0", False, Status.CANCELLED),
        (RAN, "TIMEOUT", False, Status.FAILED_CONTROLLER),
        (RAN, "COMPLETED", False, Status.FAILED_CONTROLLER),
        (RAN, None, False, Status.FAILED_CONTROLLER),
        (RAN, None, True, Status.CANCELLED),
        (DONE, None, True, Status.SUCCEEDED),
        (DONE, "FAILED", False, Status.SUCCEEDED),
    ],
)
def test_where_a_job_stands(life: Life, state: str | None, cancelled: bool, expected: Status) -> None:
    """An exit status alone is never the truth: what is done is what the controller has said."""
    queued = None if state is None else Queued(state, "Resources")
    found = stand(life, queued, is_cancelled=cancelled, output="/x/slurm.log")
    assert found.status is expected
    if expected is Status.FAILED_CONTROLLER:
        assert "/x/slurm.log" in found.reason


def test_why_it_waits_is_told() -> None:
    found = stand(RAN, Queued("PENDING", "BeginTime"), is_cancelled=False, output="")
    assert found.reason == "waits in Slurm (BeginTime)"


@given(st.lists(st.sampled_from(MESSAGES)), st.lists(st.integers(1, 40)))
def test_messages_arrive_however_the_bytes_are_cut(messages: list[Message], cuts: list[int]) -> None:
    data = b"slurmstepd: hello\n" + b"".join(map(write, messages))
    inbox, found = Inbox(), []
    for cut in [*cuts, len(data)]:
        found += inbox.take(data[:cut])
        data = data[cut:]
    assert found == messages
    assert inbox.others == ["slurmstepd: hello"]


def test_an_outcome_is_told_as_it_was() -> None:
    outcome = Outcome(Phase.SETUP, killed_by=15, is_stopped=True)
    assert EndedNode.of(3, outcome).outcome() == outcome


def test_papers_keep_what_they_are_given(tmp_path: Path) -> None:
    papers = Papers(JobFolder(tmp_path))
    facts = Facts(3, "n", "id", 2, 8, True, "me", Terms(2, 1, frozenset({33}), grace_s=9.0), {"A": "b"})
    papers.write_facts(facts)
    assert papers.facts() == facts
    assert papers.story() == Story()
    story = Story(RAN, 2, "17", 5, 1, 0, 1.0, None)
    papers.write_story(story)
    assert papers.story() == story
    assert papers.asked() == []
    papers.ask(Asked("preempt", 1.5))
    papers.ask(Asked("cancel", 0.0))
    assert papers.asked() == [Asked("preempt", 1.5), Asked("cancel", 0.0)]
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("*.json")} == {0}, "secrets stand there"
