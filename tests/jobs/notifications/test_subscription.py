"""Targets and statuses of notifications, as they are chosen at a launch."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidInput
from holdfast.jobs.status import FINAL, JobStatus
from holdfast.jobs.task.subscription import subscribe


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the variables."""
    monkeypatch.delenv("HOLDFAST_NOTIFY", raising=False)
    monkeypatch.delenv("HOLDFAST_NOTIFY_ON", raising=False)


def test_the_default_is_every_end_and_each_recovery() -> None:
    assert subscribe(["notify-send hi"], None).statuses == {*FINAL, JobStatus.RECOVERING}
    assert subscribe(None, None).targets == ()


def test_groups_and_statuses_are_combined() -> None:
    found = subscribe(["x"], ["failed,Running", "winding_down"]).statuses
    failures = {JobStatus.FAILED, JobStatus.FAILED_SETUP, JobStatus.FAILED_CONTROLLER}
    assert found == {*failures, JobStatus.RUNNING, JobStatus.WINDING_DOWN}


def test_a_text_is_one_target() -> None:
    found = subscribe("notify-send hi", "running,failed_setup")
    assert found.targets == ("notify-send hi",)
    assert found.statuses == {JobStatus.RUNNING, JobStatus.FAILED_SETUP}


def test_the_environment_has_defaults_that_options_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_NOTIFY", "mail me -s 'a job'\n\n  https://h.example/x\n")
    monkeypatch.setenv("HOLDFAST_NOTIFY_ON", "failed")
    found = subscribe(None, None)
    assert found.targets == ("mail me -s 'a job'", "https://h.example/x")
    assert JobStatus.SUCCEEDED not in found.statuses
    assert subscribe(["other"], None).targets == ("other",)
    assert subscribe([], None).targets == ()
    assert subscribe(None, ["succeeded"]).statuses == {JobStatus.SUCCEEDED}


@pytest.mark.parametrize(
    "target",
    [
        *("", "  ", "ftp://h/SECRET", "file:///etc/SECRET", "http://", "https:///SECRET", "x" * 9000),
        *("https://me:SECRET@h/", "https://h/SECRET x", "https://h/SECRET\x00", "https://ü/SECRET"),
        "http://h:port/SECRET",
    ],
)
def test_an_invalid_target_is_refused_without_its_text(target: str) -> None:
    with pytest.raises(InvalidInput, match="Nothing was started") as caught:
        subscribe(["true", target], None)
    assert "--notify, number 2" in str(caught.value)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("word", ["done", "", "pending", "failed,,ended"])
def test_an_unknown_status_is_refused(word: str) -> None:
    with pytest.raises(InvalidInput, match="unknown status"):
        subscribe(["true"], [word])


def test_statuses_without_a_target_are_refused() -> None:
    with pytest.raises(InvalidInput, match="needs --notify"):
        subscribe(None, ["failed"])


def test_a_subscription_is_shown_without_its_targets() -> None:
    assert "SECRET" not in repr(subscribe(["https://h/SECRET"], None))
