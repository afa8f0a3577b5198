"""A save as its user sees it: a future with stages."""

from __future__ import annotations

import logging
import pickle

import pytest

from holdfast import RetryLater, Save
from holdfast.errors import Denied, MissingKey, NotFound, TimedOut, Unsupported
from holdfast.system import log


def durable(step: int) -> Save:
    save = Save(step)
    save.mark_staged()
    save.mark_durable()
    return save


def test_a_durable_save_returns_its_step() -> None:
    save = durable(3)
    assert (save.done(), save.result(), save.exception()) == (True, 3, None)


def test_a_failed_save_raises_its_error() -> None:
    save, error = Save(3), Denied("no access")
    assert not save.done()
    save.mark_failed(error)
    assert save.done()
    assert save.exception() is error
    with pytest.raises(Denied, match="no access"):
        save.result()
    with pytest.raises(Denied, match="no access"):
        save.wait_home()


def test_a_skipped_save_has_no_step_and_no_error() -> None:
    save = Save(3)
    save.mark_skipped()
    assert (save.done(), save.result(), save.exception(), save.state) == (True, None, None, "skipped")


@pytest.mark.parametrize(
    "wait", ["result", "exception", "wait_staged", "wait_durable", "wait_home"], ids=lambda name: name
)
def test_a_wait_that_is_too_long_is_a_timeout(wait: str) -> None:
    save = Save(3)
    with pytest.raises(TimeoutError, match="Step 3 is not") as caught:
        getattr(save, wait)(0.0)
    assert isinstance(caught.value, RetryLater)
    assert caught.value.step == 3


def test_a_save_that_is_not_in_home_is_still_done() -> None:
    save = durable(3)
    assert save.done()
    assert not save.is_settled_in_home
    save.mark_home_failed(RetryLater("home is away"))
    assert save.is_settled_in_home
    assert save.exception() is None
    with pytest.raises(RetryLater, match="away"):
        save.wait_home()


@pytest.mark.parametrize("error", [TimedOut("late", step=2), MissingKey("no w", step=2, key="w")])
def test_errors_of_two_kinds_keep_their_text_when_pickled(error: RetryLater | NotFound) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.step, copy.key) == (type(error), str(error), 2, error.key)


def test_a_missing_key_is_a_key_error() -> None:
    assert issubclass(MissingKey, KeyError)
    assert issubclass(MissingKey, NotFound)
    assert str(MissingKey("Step 3 holds no tensor 'w'.")) == "Step 3 holds no tensor 'w'."


def test_a_wait_that_runs_out_names_its_cause() -> None:
    save = Save(5)
    save.delay = "No space left on device."
    with pytest.raises(RetryLater, match=r"not durable after 0\.0 s\. No space left on device\."):
        save.wait_durable(0.0)


@pytest.mark.parametrize("stage", ["staged", "durable", "in home"])
def test_a_wait_that_takes_long_is_logged_once(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """A notebook cell waited two minutes, and printed nothing."""
    save, lines = Save(5), list[str]()

    class Ending(logging.Handler):
        """Handler that ends the wait once the line is there."""

        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            save.mark_durable()
            save.mark_home()

    monkeypatch.setattr(log, "QUIET_S", 0.0)
    logger, handler = log.get_logger("checkpoint.keeper"), Ending()
    logger.addHandler(handler)
    try:
        waits = {"staged": save.wait_staged, "durable": save.wait_durable, "in home": save.wait_home}
        waits[stage]()
    finally:
        logger.removeHandler(handler)
    save.wait_home()
    assert lines == [f"waiting until step 5 is {stage}. It is staging now."]


def test_a_wait_for_copies_on_peers_ends_where_there_will_be_none() -> None:
    save = Save(1)
    save.mark_staged()
    with pytest.raises(Unsupported, match=r"this run has no peers\. Give Checkpointer\(peers=1\)"):
        save.wait_mirrored()
    skipped, failed = Save(2), Save(3)
    skipped.mark_skipped()
    skipped.wait_mirrored()
    failed.mark_failed(RetryLater("the copy failed"))
    with pytest.raises(RetryLater, match="the copy failed"):
        failed.wait_mirrored()
    copied = Save(4)
    copied.has_peers = True
    copied.mark_staged()
    copied.mark_mirrored()
    copied.wait_mirrored()
    assert copied.mirrored
