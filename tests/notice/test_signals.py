"""Notices: signals become a word to ask for, and go back to whoever had them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from holdfast.notice import SIGNALS, Notices


@pytest.fixture
def notices() -> Iterator[Notices]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    found = Notices()
    assert found.watch()
    yield found
    found.unwatch()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_notice_with_its_name(notices: Notices, number: int) -> None:
    assert notices.reason is None
    os.kill(os.getpid(), number)
    assert notices.reason == signal.Signals(number).name


def test_only_a_second_ctrl_c_interrupts_whatever_came_between(
    notices: Notices, capfd: pytest.CaptureFixture[str]
) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    os.kill(os.getpid(), signal.SIGTERM)
    assert notices.reason == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_handler_that_somebody_put_over_ours_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    notices = Notices()
    notices.watch()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    notices.unwatch()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)


def test_other_threads_cannot_watch_and_say_so() -> None:
    answers = []
    thread = threading.Thread(target=lambda: answers.append(Notices().watch()))
    thread.start()
    thread.join()
    assert answers == [False]
