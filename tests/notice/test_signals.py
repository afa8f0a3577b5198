"""Signals: each is a notice, and closing the watcher restores the previous handlers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from holdfast.watch.preemption.signals import SIGNALS
from holdfast.watch.preemption.trainer import NoticeWatcher


@pytest.fixture
def notices() -> Iterator[NoticeWatcher]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    found = NoticeWatcher()
    assert found.watch_signals()
    yield found
    found.close()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_notice_with_its_name(notices: NoticeWatcher, number: int) -> None:
    assert notices.reason is None
    os.kill(os.getpid(), number)
    assert notices.reason == signal.Signals(number).name


def test_only_a_second_ctrl_c_interrupts_even_after_another_signal(
    notices: NoticeWatcher, capfd: pytest.CaptureFixture[str]
) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    os.kill(os.getpid(), signal.SIGTERM)
    assert notices.reason == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_handler_installed_over_ours_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    notices = NoticeWatcher()
    notices.watch_signals()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    notices.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)


def test_watching_in_another_thread_returns_false() -> None:
    answers = []
    thread = threading.Thread(target=lambda: answers.append(NoticeWatcher().watch_signals()))
    thread.start()
    thread.join()
    assert answers == [False]
