"""Signals in real processes, handlers of users, and each signal as a notice."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.watch.preemption.signals import SIGNALS
from holdfast.watch.preemption.trainer import NoticeWatcher
from nursery import shared

LIMIT_S = 600.0

TRAIN = """
import os, signal, sys
import torch
import holdfast

def send(number, to=0):
    os.kill(to or os.getpid(), number)

def train(home, total=1000, at=5, number=signal.SIGTERM):
    state = {"x": torch.zeros(1)}
    with holdfast.Checkpointer(home, state, every=1000, quiet=True) as ckpt:
        for step in ckpt.steps(total):
            state["x"] += 1
            if step == at:
                send(number)
"""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in its own process. The exit status is negative if a signal ended it."""
    (folder / "script.py").write_text(TRAIN + textwrap.dedent(script))
    return shared().run(["script.py"], cwd=folder, timeout_s=LIMIT_S)


SCRIPTS = {
    "a second checkpointer does not swallow the signal of the first": (
        75,
        "",
        """
        other = holdfast.Checkpointer("other", {"y": torch.zeros(1)}, quiet=True)
        train("home")
        """,
    ),
    "a checkpointer made and closed within the loop leaves the first watching": (
        75,
        "",
        """
        state = {"x": torch.zeros(1)}
        with holdfast.Checkpointer("home", state, quiet=True) as ckpt:
            for step in ckpt.steps(1000):
                state["x"] += 1
                if step == 3:
                    holdfast.Checkpointer("other", {"y": torch.zeros(1)}, quiet=True).close()
                if step == 5:
                    send(signal.SIGTERM)
        """,
    ),
    "the first closed first leaves the second watching and then the default": (
        -signal.SIGTERM,
        "both closed\n",
        """
        first = holdfast.Checkpointer("a", {"y": torch.zeros(1)}, quiet=True)
        second = holdfast.Checkpointer("b", {"y": torch.zeros(1)}, quiet=True)
        first.should_save(1), second.should_save(1)
        first.close()
        send(signal.SIGTERM)
        assert second.should_save(2) and second.preempted == "SIGTERM"
        second.close()
        print("both closed", flush=True)
        send(signal.SIGTERM)
        """,
    ),
    "terminate ends a process forked by multiprocessing": (
        0,
        "-15\n",
        """
        import multiprocessing, time
        with holdfast.Checkpointer("home", {"y": torch.zeros(1)}, quiet=True) as ckpt:
            ckpt.should_save(1)
            context = multiprocessing.get_context("fork")
            ready = context.Event()
            def sleep():
                ready.set()
                time.sleep(600)
            process = context.Process(target=sleep)
            process.start()
            assert ready.wait(600)
            process.terminate()
            process.join()
            print(process.exitcode)
        """,
    ),
    "a previously installed handler is called too": (
        75,
        "mine 15\n",
        """
        signal.signal(signal.SIGTERM, lambda number, frame: print("mine", number, flush=True))
        train("home")
        """,
    ),
    "a handler installed later replaces ours and may call it": (
        -signal.SIGTERM,
        "theirs\ntheirs\n",
        """
        ckpt = holdfast.Checkpointer("home", {"x": torch.zeros(1)}, quiet=True)
        ckpt.should_save(1)
        ours = signal.getsignal(signal.SIGTERM)
        theirs = lambda number, frame: (print("theirs", flush=True), ours(number, frame))
        signal.signal(signal.SIGTERM, theirs)
        another = holdfast.Checkpointer("another", {"x": torch.zeros(1)}, quiet=True)
        another.should_save(1)
        send(signal.SIGTERM)
        assert ckpt.should_save(2) and another.should_save(2)
        another.close()
        ckpt.close()
        assert signal.getsignal(signal.SIGTERM) is theirs
        send(signal.SIGTERM)
        """,
    ),
    "a previously installed handler may exit": (
        9,
        "",
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\ntrain('home')",
    ),
    "an ignored signal stays ignored": (
        0,
        "",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntrain('home', total=20)",
    ),
}
"""Status and output of some scripts."""


@pytest.mark.parametrize(("status", "output", "script"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_has_the_status_and_output(tmp_path: Path, status: int, output: str, script: str) -> None:
    done = run(tmp_path, script)
    assert (done.stdout, done.returncode) == (output, status), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_kill_a_forked_child_as_if_nothing_were_installed(tmp_path: Path, number: int) -> None:
    script = f"""
    ckpt = holdfast.Checkpointer("home", {{"y": torch.zeros(1)}}, quiet=True)
    ckpt.should_save(1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, b".")
            while True:  # until the signal: pause() would miss one that came right before it
                pass
        except KeyboardInterrupt:
            os._exit(130)
    os.read(read, 1)
    send({int(number)}, child)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ckpt.close()
    """
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (130 if number == signal.SIGINT else -number)


def test_a_forked_child_can_train_and_be_preempted_itself(tmp_path: Path) -> None:
    script = """
    ckpt = holdfast.Checkpointer("parent", {"y": torch.zeros(1)}, quiet=True)
    child = os.fork()
    if child == 0:
        train("child", number=signal.SIGINT)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ckpt.close()
    """
    done = run(tmp_path, script)
    assert "75" in done.stdout.splitlines(), done.stderr


def test_a_handler_of_c_code_is_left_alone_with_a_warning(tmp_path: Path) -> None:
    script = """
    import faulthandler as handlers
    handlers.register(signal.SIGUSR1)
    train("home", total=20, number=signal.SIGUSR1)
    """
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert "SIGUSR1 is not treated as a preemption notice" in done.stderr
    assert "most recent call first" in done.stderr, "its own handler has run"


@pytest.mark.parametrize(
    "call", ["save(9)", "record(9, loss=1.0)", "wait()", "close()", "should_save(9)", "restore()"]
)
def test_a_call_from_a_handler_that_interrupts_a_save_is_rejected_and_the_save_completes(
    tmp_path: Path, call: str
) -> None:
    """The handler runs in the middle of the copy, so waiting for the copy would deadlock."""
    script = f"""
    from holdfast.checkpoint.stage import stager
    ckpt = holdfast.Checkpointer("home", {{"x": torch.arange(5.0)}}, quiet=True)
    def handler(*_):
        try:
            ckpt.{call}
        except holdfast.InvalidInput as error:
            print(error, flush=True)
    signal.signal(signal.SIGUSR2, handler)
    copy = stager._copy_in_threads
    def copy_interrupted(*args):
        stager._copy_in_threads = copy
        send(signal.SIGUSR2)
        copy(*args)
    stager._copy_in_threads = copy_interrupted
    ckpt.save(5).wait_durable()
    ckpt.save(6).wait_durable()
    ckpt.close()
    """
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert "while save() was running in the same thread" in done.stdout
    assert sorted(int(path.name[5:]) for path in (tmp_path / "home").glob("step-*")) == [5, 6]


def test_handlers_that_save_at_random_moments_neither_block_the_training_nor_tear_a_copy(
    tmp_path: Path,
) -> None:
    script = """
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = holdfast.Checkpointer("home", {"model": model, "optimizer": optimizer}, every=5, quiet=True)
    seen = {"done": 0, "refused": 0, "step": 0}
    def handler(*_):
        try:
            ckpt.save(seen["step"])
            seen["done"] += 1
        except holdfast.InvalidInput:
            seen["refused"] += 1
        again()
    def again():  # in processor time after the last call: on a busy machine, training advances too
        signal.setitimer(signal.ITIMER_PROF, 0.003)
    signal.signal(signal.SIGPROF, handler)
    again()
    for step in range(1, 400):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        seen["step"] = step
        ckpt.record(step, loss=1.0)
        if ckpt.should_save(step):
            ckpt.save(step)
    signal.setitimer(signal.ITIMER_PROF, 0)
    ckpt.close()
    print(seen["done"] + seen["refused"])
    """
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    assert "dropped" not in done.stderr


def test_a_save_from_a_handler_that_interrupts_an_optimizer_is_rejected(tmp_path: Path) -> None:
    """Some of its parameters may already be updated and others not."""
    script = """
    model = torch.nn.Linear(64, 64)
    class Interrupted(torch.optim.SGD):
        def _init_group(self, *args):
            send(signal.SIGUSR2)
            return super()._init_group(*args)
    optimizer = Interrupted(model.parameters(), lr=0.1)
    ckpt = holdfast.Checkpointer("home", {"model": model, "optimizer": optimizer}, quiet=True)
    def handler(*_):
        try:
            ckpt.save(1)
        except holdfast.InvalidInput as error:
            print(error, flush=True)
    signal.signal(signal.SIGUSR2, handler)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    ckpt.save(2)
    optimizer.register_step_post_hook(lambda *_: ckpt.save(3))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    optimizer.step()
    ckpt.close()
    """
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert "in the middle of Interrupted.step()" in done.stdout
    assert sorted(int(path.name[5:]) for path in (tmp_path / "home").glob("step-*")) == [2, 3]


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
