"""The explorer of crash states on one real run: nothing fails, and defects that are planted are found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from campaigns.crash_states import recording as recordings
from campaigns.crash_states.explorer import Outcome, check_state, explore, from_json
from campaigns.crash_states.operations import Log, Mark, read_log
from campaigns.crash_states.recording import Recording
from campaigns.crash_states.trace import Call
from campaigns.crash_states.workloads import Act, Workload

SMALL = Workload("small", "five saves of which 2 stay", (Act("save", (1, 1, 5, 2)),), keep=2)
pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return recordings.make(SMALL, tmp_path_factory.mktemp("crash") / "small")


def explored(recording: Recording, log: Log, *, num_states: int = 120, resumed_share: float = 0.0) -> Outcome:
    return explore(recording, log, num_states=num_states, seed=1, num_workers=1, resumed_share=resumed_share)


def without(recording: Recording, is_left_out: str) -> Log:
    """The log of the same run by a store that makes no fsync of directories, or none of files."""

    def is_kept(call: Call) -> bool:
        is_of_file = "/.unfinished-" in call.arguments
        return call.name != "fsync" or is_of_file == (is_left_out == "directories")

    return read_log(filter(is_kept, recording.calls()), recording.root)


@pytest.mark.essential
def test_every_state_of_a_run_restores_what_was_durable(recording: Recording):
    outcome = explored(recording, recording.read(), num_states=150, resumed_share=0.03)
    assert outcome.num_distinct == 150
    assert outcome.num_resumed > 0
    assert outcome.failures == []


def test_a_missing_fsync_of_a_directory_is_found(recording: Recording):
    outcome = explored(recording, without(recording, "directories"))
    assert any("was durable" in failure.problem for failure in outcome.failures)


def test_a_missing_fsync_of_a_file_is_found(recording: Recording):
    outcome = explored(recording, without(recording, "files"))
    assert outcome.num_failed > 0


def test_a_promise_that_comes_too_early_is_found(recording: Recording):
    log = recording.read()
    log.marks = [Mark(at=mark.at // 2, text=mark.text) for mark in log.marks]
    assert any("was durable" in failure.problem for failure in explored(recording, log).failures)


def test_a_failure_can_be_shown_again(recording: Recording, tmp_path: Path):
    log = without(recording, "directories")
    failure = explored(recording, log).failures[0]
    problems = check_state(log, recording, from_json(failure.state), tmp_path / "state", is_resumed=False)
    assert failure.problem in problems
