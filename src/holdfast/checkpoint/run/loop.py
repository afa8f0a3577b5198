"""Training loop of a Checkpointer: its steps, what is recorded during them, and how it is left."""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, NoReturn, SupportsFloat

from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.training import Training
from holdfast.errors import InvalidInput
from holdfast.system.units import parse_step

_PAUSES = frozenset({"YIELD_VALUE", "RESUME", "SEND", "INSTRUMENTED_YIELD_VALUE", "INSTRUMENTED_RESUME"})

Loop = tuple[tuple[int, object], ...]
"""Identities of the frames that requested the last item of a generator, innermost first."""


def looping() -> Loop:
    """Return the frames that requested an item of the calling generator: the loop's, and generators between.

    Call it before each `yield`.
    """
    frames: list[tuple[int, object]] = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        frames.append((id(frame), frame.f_code))
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            break
        frame = frame.f_back
    return tuple(frames)


def is_orderly(leaving: GeneratorExit, loop: Loop, around: BaseException | None) -> bool | None:
    """Return True if a loop was left in order, not by an exception.

    In order means by `break`, `return`, `close()` or the end of another iterator.

    Call it in the generator that the loop runs over, in its handler of GeneratorExit. An exception that ends
    a loop drops the generator too, and is not visible in it. But the interpreter has by then recorded, in a
    traceback, the instruction of the loop's frame that raised, and the frame has not moved since.

    Args:
        leaving: exception that ends the generator.
        loop: frames of the last item, see `looping`.
        around: exception that was being handled when the loop began, if any.

    Returns:
        None if the generator was kept after its loop and is dropped only now, so the frames are gone.

    Blocks: to visit all objects of the process, about 0.1 s for a million.
    """
    if leaving.__context__ is not None and leaving.__context__ is not around:
        return False  # closed by a handler of an exception, or by the `finally` after one
    frame = sys._getframe(1).f_back
    if frame is None or (id(frame), frame.f_code) not in loop:
        return None
    while frame is not None and _has_raised(frame):
        if not _is_paused_generator(frame):
            return False
        frame = frame.f_back  # a generator around this one, which its own loop has left: look at that loop
    return True


def _has_raised(frame: FrameType) -> bool:
    """Return True if the current instruction of a frame has raised an exception."""
    found = gc.get_referrers(frame)
    return any(
        isinstance(one, TracebackType) and one.tb_frame is frame and one.tb_lasti == frame.f_lasti
        for one in found
    )


def _is_paused_generator(frame: FrameType) -> bool:
    """Return True if a frame is a generator paused at a `yield`."""
    is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    return is_generator and dis.opname[frame.f_code.co_code[frame.f_lasti]] in _PAUSES


class TrainingLoop(ABC):
    """Calls of a Checkpointer for the loop of a training, and the facts about its run."""

    _components: Components
    _training: Training
    _state: MutableMapping[str, Any] | None

    @abstractmethod
    def save(self, step: int) -> Save:
        """Save the present state as the checkpoint of `step`; see `Checkpointer.save`."""

    @property
    def state(self) -> MutableMapping[str, Any]:
        """State that is saved. Raises `InvalidInput` if the Checkpointer was made without one."""
        self._check_state("state")
        assert self._state is not None
        return self._state

    @property
    def preempted(self) -> str | None:
        """Reason why the run has to stop, agreed by all ranks; None while it need not."""
        return self._training.preempted

    @property
    def must_go_back(self) -> str | None:
        """Reason why training has to go back, agreed by all ranks; None while it need not.

        Only with a watch that goes back, such as `Spike("rollback")`. A loop of your own then calls
        `roll_back`.
        """
        return self._training.must_go_back

    @property
    def restored_step(self) -> int | None:
        """Step that this start of the run continues; None if it started from scratch."""
        return self._training.attempt.base_step

    @property
    def restored_attempt(self) -> int | None:
        """Attempt that saved the checkpoint of `restored_step`; None if it started from scratch."""
        return self._training.attempt.base_attempt

    @property
    def run_id(self) -> str | None:
        """Id of the run, the same at every start; None before this start has claimed its home."""
        keeper = self._training.attempt.keeper
        return None if keeper is None else keeper.config.run

    @property
    def attempt(self) -> int | None:
        """Number of the present attempt; None before the claim. Each start has its own, and each rollback."""
        keeper = self._training.attempt.keeper
        return None if keeper is None else keeper.config.attempt

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._components.ranks.rank

    @property
    def num_skipped(self) -> int:
        """Number of saves that were skipped because no staging memory was free."""
        return self._components.pipeline.num_skipped

    @property
    def waited_for_memory_s(self) -> float:
        """Time that `save` has waited for staging memory, in all."""
        return self._components.pipeline.waited_for_memory_s

    @property
    def waited_for_copy_s(self) -> float:
        """Time that optimizers have waited in `step()` for a copy under way, in all."""
        return self._components.pipeline.stager.waited_s

    # -- the loop --------------------------------------------------------------------------------------------
    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps of a training loop, from where the run stopped up to `total`.

        Claims the home and restores the newest checkpoint first. After a call of `restore`, `load` or
        `continue_from` it begins where that left off and restores nothing, so what you have set since then
        stays. Yields the number of steps completed so far; the loop's body completes one more. Saves when
        due, and calls `finish` at the end. A loop that is left by `break` or `return` is saved too, but not
        finished. One that is left by an exception is not saved, since its last step may be incomplete. A run
        that has all its steps already yields nothing. With `Spike("rollback")` the steps after a rollback
        come again.

        Raises:
            InvalidInput: `total` is not a whole number from 0.
            Conflict: another living process saves to this home; see `take_over`.
            Preempted: after a preemption notice, once the save of the agreed step is durable, unless that is
                the last step. It is a SystemExit with status 75; do not catch it.
            Diverged: a metric is in a spike, after as many rollbacks in a row as its watch allows.

        Ranks: collective; every rank runs the same steps.
        """
        total, around = parse_step(total, "steps()"), sys.exc_info()[1]
        self._check_state("steps()")
        step = self._training.begin_loop(total)
        while step < total:
            self._training.position.reach(step, is_counted=True)
            loop = looping()
            try:
                yield step
            except GeneratorExit as leaving:
                self._training.leave(is_orderly=is_orderly(leaving, loop, around))
                raise
            step += 1
            if self.should_save(step):
                self.save(step)
            if self.preempted and step < total:  # else the run is complete and need not start again
                self._training.stop(step)
            if self.must_go_back:
                step = self.roll_back()
        self.finish(step)

    def should_save(self, step: int) -> bool:
        """Return True if `step` should be saved now: it is due, or a preemption notice arrived.

        After a notice `preempted` holds the reason, on all ranks at the same step, and likewise
        `must_go_back` if training has to go back.

        Args:
            step: optimizer steps completed.

        Raises:
            InvalidInput: `step` is not a whole number from 0, or this thread is within another call; or
                training did not go back where it had to.
            Diverged: a metric is in a spike, after as many rollbacks in a row as its watch allows.

        Ranks: collective; every rank calls it after every step.
        Blocks: hardly; the ranks exchange a few flags while the step runs.
        """
        with self._training.guard("should_save()", is_phase=False):
            return self._training.end_step(parse_step(step, "should_save()"))

    def step_done(self) -> int:
        """Count one completed step, save it if due, and return the number of completed steps.

        One call per step is all that a loop of your own needs between `restore` and `finish`. The count
        continues from the restored step, and is the step of a checkpoint: the optimizer steps completed. With
        `Spike("rollback")` it may go back.

        Raises:
            Preempted: after a preemption notice, once the save of this step is durable. It is a SystemExit
                with status 75; do not catch it.
            HoldfastError: as `save`.

        Ranks: collective; every rank calls it after every step.
        Blocks: as `should_save` and `save`.
        """
        self._check_state("step_done()")
        step = self._components.metrics.num_done + 1
        if self.should_save(step):
            self.save(step)
        if self.preempted:
            self._training.stop(step)
        return self.roll_back() if self.must_go_back else step

    def record(self, step: int | None = None, /, **values: SupportsFloat) -> None:
        """Record metrics of a step in the history, such as `record(loss=loss, lr=lr)`. On rank 0 only.

        The report draws them as one curve across all attempts. A tensor on a device is read when its value
        has arrived; no step waits for it. A checkpoint keeps the values of its own step, or else the newest
        since the save before; see `Keep`.

        Args:
            step: optimizer steps completed; by default the one that is running. For a checkpoint, values
                without a step that are recorded after `save`, before training changes the state, count for
                the step that was saved.
            values: a number, or a tensor of one element, by name. The last value of a name and step counts.

        Raises:
            InvalidInput: a value is not a number, a name is not valid, or there are too many; or `step` is
                not a whole number from 0.

        Ranks: not collective.
        Blocks: no. A failed write is a SaveWarning, and training continues.
        """
        with self._training.guard("record()", is_phase=False):
            self._training.record(None if step is None else parse_step(step, "record()"), values)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a phase of the loop, such as an evaluation.

        It does not count as a part of a step, and has a limit of its own; see `Hang`. The calls of the
        Checkpointer mark themselves.

        Args:
            name: its name, such as "eval", for people and to learn how long it takes.

        Ranks: not collective.
        Blocks: no.
        """
        return self._training.phase_of_user(name)

    def roll_back(self) -> int:
        """Go back to the newest healthy checkpoint before a spike, and return its step.

        For a loop of your own, once `must_go_back` is set. What can skip samples leaves out those since
        then, for ever: also after a restore of an older checkpoint. See `Spike`.

        Raises:
            InvalidInput: `must_go_back` is not set; or an object of the state refuses to skip samples.
            HoldfastError: as `restore` and `save`.

        Ranks: collective.
        Blocks: until the saves under way are durable, and the state is restored and saved anew.
        """
        with self._training.guard("roll_back()", alone=True):
            return self._training.roll_back()

    def finish(self, step: int | None = None) -> None:
        """Save the last step, wait until it is durable, and mark the run as finished.

        `steps` calls it at its end. A loop of your own calls it once, after its last step.

        Args:
            step: optimizer steps completed; by default the newest that `should_save` was called with.

        Raises:
            InvalidInput: `step` is not a whole number from 0; or it is not given, and not known.
            HoldfastError: the save failed.

        Ranks: not collective, but waits for every rank's parts; every rank calls it.
        Blocks: until the newest save is durable in home.
        """
        with self._training.guard("finish()"):
            self._training.finish(None if step is None else parse_step(step, "finish()"))

    def stop(self, step: int) -> NoReturn:
        """End a preempted run: wait until everything saved is durable, close, and raise Preempted.

        For a loop of your own, after `save(step)` and once `preempted` is set.

        Args:
            step: optimizer steps completed. With a state of its own, the Checkpointer saves it if it is not.

        Raises:
            Preempted: always. It is a SystemExit with status 75; do not catch it.
            HoldfastError: the save failed.

        Ranks: collective.
        Blocks: as `wait` and `close`.
        """
        self._training.stop(parse_step(step, "stop()"))

    def _check_state(self, call: str) -> None:
        """Check that the Checkpointer can save without being given a state."""
        if not self._components.has_state:
            raise InvalidInput(
                f"{call} needs the state, and this Checkpointer was made without one. Give it one, "
                "Checkpointer(home, state), or call should_save(step) and save(step, state) in your own loop."
            )
