"""Torn copies: writes during a copy are detected, and the save is repeated."""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from campaigns import tears
from campaigns.tears import KINDS, run_case
from holdfast.checkpoint.stage import stager, watch
from holdfast.checkpoint.stage.stager import Repeats
from holdfast.cli import main
from holdfast.errors import InvalidInput, SaveWarning
from stage.training import (
    WAIT_S,
    CopyGate,
    check_saved,
    compute_gradients,
    make_checkpointer,
    make_model,
    make_training,
    snapshot,
    train,
)

QUICK = [
    *("write data.clamp_ of one", "write _foreach_mul_", "write numpy alias", "write second optimizer"),
    *("own pre-hook that writes", "shared memory"),
]


@pytest.mark.parametrize("name", QUICK)
def test_checkpoints_are_never_torn_and_some_are_saved(tmp_path: Path, name: str) -> None:
    """The campaign of torn copies runs all kinds, sizes and moments; here are some."""
    kind = next(kind for kind in KINDS if kind.name == name)
    outcome = run_case(kind, 128, "after the copy", tmp_path / "home")
    assert outcome.is_good, outcome


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_write_during_the_copy_drops_the_save_with_a_warning_and_the_next_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    """With a change of PyTorch's version counter or without. The error names the tensor."""
    state = make_training()
    gate, weight = CopyGate(monkeypatch), state["model"].get_parameter("2.weight")
    with make_checkpointer(tmp_path / "home", state, every=100, keep=None) as ckpt:
        train(state["model"], state["optimizer"])
        torn = ckpt.save(1)
        assert gate.reached.wait(600)
        (weight.detach() if is_counted else weight.data).clamp_(-0.01, 0.01)
        gate.opened.set()
        with pytest.raises(InvalidInput, match=r"model\.2\.weight was written while it was being copied"):
            torn.wait_durable()
        assert torn.failed is not None
        assert (torn.state, torn.failed.key, torn.failed.step) == ("failed", "model.2.weight", 1)
        assert ckpt.should_save(2), "the save is repeated, though none is due"
        expected = snapshot(state)
        with pytest.warns(SaveWarning, match=r"step 1 was dropped: model\.2\.weight was written"):
            repeated = ckpt.save(2)
        weight.data.clamp_(-0.001, 0.001)  # it was copied before save() returned
        repeated.wait_durable()
        assert not ckpt.should_save(3)
    check_saved(tmp_path / "home", 2, expected)
    assert not list((tmp_path / "home").glob("step-00000001/*"))
    assert any('"dropped"' in line for line in history_of(tmp_path / "home"))


@pytest.mark.parametrize(
    "shown", [lambda b: b[:211], lambda b: b[:433], lambda b: b[:300:2], lambda b: b[:300].t()]
)
@pytest.mark.parametrize("is_written", [False, True])
def test_a_parameter_that_becomes_another_part_of_its_memory_is_not_torn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: Callable[[torch.Tensor], torch.Tensor],
    is_written: bool,
) -> None:
    """It is pruned, grown or strided at the same address between two saves, and perhaps written to."""
    buffer, state, gate = torch.randn(600, 300), make_training(300), CopyGate(monkeypatch)
    weight = state["model"].get_parameter("0.weight")
    weight.data = buffer[:300]
    gate.opened.set()
    with make_checkpointer(tmp_path / "home", state, keep=None) as ckpt:
        ckpt.save(1).wait_durable()
        weight.data = shown(buffer)
        expected = snapshot(state)
        gate.opened.clear()
        save = ckpt.save(2)
        if is_written:
            weight.data[-20:] += 1
        gate.opened.set()
        try:
            save.wait_durable()
        except InvalidInput:  # the copy was torn
            assert is_written
            expected = snapshot(state)
            with pytest.warns(SaveWarning, match="step 2 was dropped"):
                save = ckpt.save(3)
    check_saved(tmp_path / "home", save.step, expected)


@pytest.mark.parametrize("end", ["finish", "close"])
def test_a_torn_last_save_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    state, gate = make_training(), CopyGate(monkeypatch)
    ckpt = make_checkpointer(tmp_path / "home", state, every=1, keep=None)
    train(state["model"], state["optimizer"])
    assert ckpt.should_save(1)
    ckpt.save(1)
    state["model"].get_parameter("2.weight").data.clamp_(-0.01, 0.01)
    gate.opened.set()
    expected = snapshot(state)
    with pytest.warns(SaveWarning, match="step 1 was dropped"):
        ckpt.finish(1) if end == "finish" else ckpt.close()
    ckpt.close()
    check_saved(tmp_path / "home", 1, expected)


REFUSED = "Operation not permitted"


def refuse() -> None:
    raise OSError(1, REFUSED)


@pytest.mark.parametrize(
    ("refusal", "means"),
    [
        (None, "the kernel's record of written pages"),
        (REFUSED, "copying everything before save() returns, as the kernel does not record"),
    ],
)
def test_the_method_of_tear_detection_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: str | None,
    means: str,
) -> None:
    if refusal is not None:
        monkeypatch.setattr(watch, "WriteTracker", refuse)
    elif watch.Watcher().refusal is not None:
        pytest.skip("this kernel keeps no record of writes")
    logger = logging.getLogger("holdfast.checkpoint.run")
    logger.setLevel(logging.DEBUG)
    try:
        with make_checkpointer(tmp_path / "home", {"model": make_model()}) as ckpt:
            ckpt.save(1)
            ckpt.save(2)
    finally:
        logger.setLevel(logging.NOTSET)
    lines = [line for line in capsys.readouterr().err.splitlines() if "torn copies" in line]
    assert [means in line and (refusal or "") in line for line in lines] == [True]
    events = [json.loads(line) for line in history_of(tmp_path / "home")]
    details = [event["detail"] for event in events if event["event"] == "tear-check"]
    assert len(details) == 1
    assert means in details[0]
    assert (refusal or "") in details[0]
    for command in ("history", "report"):
        assert main([command, str(tmp_path / "home")]) == 0
        assert means[:20] in " ".join(capsys.readouterr().out.split())


def history_of(home: Path) -> list[str]:
    """Return the lines of all histories of a home."""
    return [line for path in (home / "history").iterdir() for line in path.read_text().splitlines()]


def test_save_from_another_thread_is_refused(tmp_path: Path) -> None:
    state = make_training()
    errors: list[BaseException] = []

    def save(step: int) -> None:
        try:
            ckpt.save(step)
        except InvalidInput as error:
            errors.append(error)

    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.save(1)
        train(state["model"], state["optimizer"])
        thread = threading.Thread(target=save, args=(2,))
        thread.start()
        thread.join()
        assert "Call save() in the thread that trains" in str(errors[0])
        expected = snapshot(state)
        ckpt.save(3)
    check_saved(tmp_path / "home", 3, expected)


class Stepper:
    """A thread that steps an optimizer outside of the state, once, and ends only when it may."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._optimizer = SGD(model.parameters(), lr=0.1)
        self._may_end = threading.Event()
        self._has_stepped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def step(self) -> None:
        """Start the thread, and return after its step."""
        self._thread.start()
        assert self._has_stepped.wait(WAIT_S)

    def end(self) -> None:
        """End the thread."""
        self._may_end.set()
        self._thread.join()

    def _run(self) -> None:
        self._optimizer.step()
        self._has_stepped.set()
        assert self._may_end.wait(WAIT_S)


def test_save_beside_a_thread_that_steps_an_optimizer_outside_of_the_state_is_refused(tmp_path: Path) -> None:
    state, other = make_training(16), make_model(16)  # too small for the kernel's record
    model = state["model"]
    elsewhere, beside = Stepper(other), Stepper(model)
    for one in (model, other):
        compute_gradients(one, 16)
    with make_checkpointer(tmp_path / "home", state, keep=None) as ckpt:
        elsewhere.step()
        ckpt.save(1)
        beside.step()
        with pytest.raises(InvalidInput, match=r"Call save\(\) in the thread that trains"):
            ckpt.save(2)
        beside.end()
        expected = snapshot(state)
        ckpt.save(3)
        elsewhere.end()
    check_saved(tmp_path / "home", 3, expected)


def test_an_optimizer_that_steps_in_a_thread_of_autograd_is_saved(tmp_path: Path) -> None:
    """On CUDA, `backward` runs hooks of gradients in a thread that Python has not started."""
    state = make_training(16)
    compute_gradients(state["model"], 16)
    with make_checkpointer(tmp_path / "home", state, keep=None) as ckpt:
        call_in_foreign_thread(state["optimizer"].step)
        expected = snapshot(state)
        ckpt.save(1)
    check_saved(tmp_path / "home", 1, expected)


def call_in_foreign_thread(function: Callable[[], object]) -> None:
    """Call a function in a thread that the C library starts."""
    libc = ctypes.CDLL(None)
    started, kind = ctypes.c_ulong(), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    errors: list[BaseException] = []

    def call(_: object) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the C library cannot raise it
            errors.append(error)

    body = kind(call)
    assert libc.pthread_create(ctypes.byref(started), None, body, None) == 0
    assert libc.pthread_join(started, None) == 0
    assert not errors


def test_a_thread_that_steps_and_ends_while_save_copies_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_training(16)
    stepper, copy_in_threads = Stepper(state["model"]), stager._copy_in_threads
    compute_gradients(state["model"], 16)

    def step_and_copy(views: list[torch.Tensor], live: list[torch.Tensor]) -> None:
        copy_in_threads(views[:1], live[:1])
        stepper.step()
        stepper.end()
        copy_in_threads(views[1:], live[1:])

    with make_checkpointer(tmp_path / "home", state, keep=None) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(stager, "_copy_in_threads", step_and_copy)
            with pytest.raises(InvalidInput, match=r"Call save\(\) in the thread that trains"):
                ckpt.save(1)
        expected = snapshot(state)
        ckpt.save(2)
    check_saved(tmp_path / "home", 2, expected)


def test_torn_tensors_are_copied_before_save_returns_for_more_and_more_saves() -> None:
    repeats = Repeats()
    repeats.record_torn(["a"])
    assert "a" in repeats
    assert "b" not in repeats
    for _ in range(8):
        assert repeats
        repeats.record_saved()
    assert "a" not in repeats
    repeats.record_torn(["a"])
    repeats.record_torn(["b"])
    assert "c" in repeats, "torn again meanwhile: nothing is copied in the background any more"
    for _ in range(32):
        assert "c" in repeats
        repeats.record_saved()
    assert not repeats


def test_the_documents_have_the_number_of_kinds() -> None:
    assert len(tears.KINDS) * len(tears.WIDTHS) * len(tears.MOMENTS) == 540
