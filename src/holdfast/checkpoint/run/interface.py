"""The Checkpointer: options, the training loop, and the calls that save, restore, wait and end."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, SupportsFloat

from torch.optim import Optimizer

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.policy import Every, single_policies
from holdfast.checkpoint.ranks import RankGroup
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.loop_exit import is_orderly, looping
from holdfast.checkpoint.run.options import (
    Home,
    Limits,
    Local,
    Memory,
    Options,
    Reads,
    parse_home,
    parse_keep,
    parse_local,
    parse_memory,
)
from holdfast.checkpoint.run.restoration import Selection
from holdfast.checkpoint.run.training import Training
from holdfast.checkpoint.run.watching import choose_watches
from holdfast.checkpoint.watch import Watch
from holdfast.errors import InvalidInput
from holdfast.system.units import Duration, parse_step, parse_timeout


class Checkpointer:
    """Checkpoints of a training run: saved in the background, verified, and restored at the next start.

    Where an option has a class of its own, its first field may be given alone: `keep=3` is `keep=Keep(3)`.

    Args:
        home: folder or URL that holds this run's checkpoints, or a `Home`; one run, one home.
        state: objects to save: modules, optimizers, anything with `state_dict`/`load_state_dict`, tensors,
            generators, plain values, and containers of all these. `restore` writes plain values back into
            this mapping. The random number generators of python, numpy and torch are always included.
            Without it each `save` brings its own, and `load` returns it; the loop is yours then.
        every: when to save: steps (500), a duration ("10m"), "auto" (as often as 1 % of the time allows),
            a policy, or None for a script that decides by itself.
        keep: number of newest checkpoints to keep, a `Keep`, or None for all.
        local: folder on each host's fast disk, or a `Local`, for a `home` that is slow or far.
        memory: limit of this rank's staging memory, in bytes or as "8GiB", or a `Memory`.
        reads: reads of a restore: their number, patience and sharing.
        limits: response to saves that fail, and limits after which the run raises.
        watches: watches of the run, such as `Hang("restart")`, `Spike("rollback")`, `Preemption("aws")` or
            `CompileCache("off")`. Each replaces the default watch of its name, and the other defaults stay,
            see `default_watches`; None for no watch at all.
        group: ranks that save together, if they are not all of torch.distributed's process group; see
            `holdfast.checkpoint.ranks`.
        take_over: save even if a living process on one of these hosts saves to this home. That process can
            no longer commit. By default the first save raises `Conflict` and names the process.
        quiet: print no lines about what was restored.

    Raises:
        InvalidInput: an argument or an entry of `state` cannot be used; or one of `local` and `home` is
            inside the other.
        Unsupported: other processes cannot reach the home.

    Ranks: collective; every rank makes it with the same arguments.
    """

    def __init__(
        self,
        home: str | os.PathLike[str] | Home,
        state: MutableMapping[str, Any] | None = None,
        *,
        every: int | str | datetime.timedelta | Every | None = 500,
        keep: int | Keep | None = 3,
        local: str | os.PathLike[str] | Local | None = None,
        memory: int | str | Memory = "8GiB",
        reads: Reads = Reads(),
        limits: Limits = Limits(),
        watches: Iterable[Watch] | None = (),
        group: RankGroup | None = None,
        take_over: bool = False,
        quiet: bool = False,
    ) -> None:
        options = Options(
            home=parse_home(home),
            policies=single_policies(every),
            keep=parse_keep(keep),
            local=parse_local(local),
            memory=parse_memory(memory),
            reads=reads,
            limits=limits,
            watches=choose_watches(watches),
            take_over=take_over,
            quiet=quiet,
        )
        going = next((watch.name for watch in options.watches if watch.goes_back is not None), None)
        if going is not None and state is None:
            raise InvalidInput(
                f"The watch {going!r} goes back, which restores the state while training runs, and this "
                "Checkpointer was made without one. Give it a state, Checkpointer(home, state), or have the "
                'watch report only, as Spike("report") does.'
            )
        self._components = Components.make(options, state, group)
        self._training = Training(self._components)
        self.home = self._components.tiers.home
        self._state = state

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

    # -- saving ----------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        *,
        optimizers: Iterable[Optimizer] = (),
        to_home: bool = False,
    ) -> Save:
        """Save the present state, or the given one, as the checkpoint of `step`.

        Returns once everything is copied that may change before the next optimizer step. Parameters and
        optimizer state are copied in the background; the optimizer's next `step()` waits for that copy.

        Args:
            step: optimizer steps completed; more than at the save before.
            state: objects to save if the Checkpointer was made without a state: tensors and values, nested
                as you like, and live objects. You may change it after the call, but for what optimizers in
                it own. A plain tensor belongs to its rank, see `replicated`; DTensors are saved in parts.
            optimizers: optimizers of which `state` contains the state dict, or the parameters. These tensors
                are copied in the background too, as if the optimizers were in `state`.
            to_home: copy it to home whether or not that is due; equal on every rank.

        Raises:
            InvalidInput: a value that cannot be saved, named with its key path; or `step` is not a whole
                number from 0, or not new; or the home holds checkpoints and `restore` was not called; or a
                signal handler has interrupted another call in this thread.
            Conflict: a newer attempt has taken over the home; or, at the first save, another living process
                saves to it, or has committed a checkpoint since `restore` read it.
            Corrupt: at the first save: there are signs of lost checkpoints, so training would begin from
                zero unnoticed.
            RetryLater: more saves than `limits` allows have failed in a row.

        Ranks: every rank calls it for the same step. Not collective, unless it may skip, or
            nothing was restored or saved before.
        Blocks: for the copy of what no optimizer owns, unless earlier saves have shown that it is written
            after a step only; and while no staging memory is free.
        """
        with self._training.guard("save()", alone=True):
            step = parse_step(step, "save()")
            if self._components.has_state and state is None:
                return self._training.save(step, to_home=to_home)
            given = self._check_given(step, state)
            return self._training.save_given(step, given, optimizers, to_home=to_home)

    def _check_given(self, step: int, state: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if self._components.has_state:
            raise InvalidInput(
                f"save({step}, state) goes with a Checkpointer that was made without a state. This one saves "
                f"the state that it was made with: call save({step}). Nothing was written.",
                step=step,
            )
        if not isinstance(state, Mapping):
            raise InvalidInput(
                f"This Checkpointer was made without a state, so save({step}) needs it: save({step}, state), "
                f"with a dict; got {type(state).__name__}. Nothing was written.",
                step=step,
            )
        return state

    def _check_state(self, call: str) -> None:
        """Check that the Checkpointer can save without being given a state."""
        if not self._components.has_state:
            raise InvalidInput(
                f"{call} needs the state, and this Checkpointer was made without one. Give it one, "
                "Checkpointer(home, state), or call should_save(step) and save(step, state) in your own loop."
            )

    def delete(self, step: int) -> None:
        """Delete the checkpoints of `step`, as soon as a newer one is complete.

        For trainers that choose by themselves what to keep, with `keep=None`. The newest checkpoint stays
        until it is no longer the newest, so a crash at any moment leaves one to resume from.

        Args:
            step: step of a checkpoint of this run, in home and in the local folder, of any attempt.

        Raises:
            InvalidInput: `step` is not a whole number from 0.

        Ranks: every rank calls it; not collective.
        Blocks: no. What could not be deleted is tried again after the next save.
        """
        step = parse_step(step, "delete()")
        with self._training.guard("delete()", is_phase=False):
            self._training.attempt.delete(step)

    def prepare(self) -> None:
        """Prepare the first save, so that it is about as quick as later ones.

        This prepares the staging memory and, after `restore()`, claims the home and starts the keeper. The
        loop of `steps` does all of it by itself, the memory in the background after its first step.

        Ranks: collective after `restore()`.
        Blocks: for about 1 s per GB of memory that the machine has not touched before, and as long to put
            the state into huge pages.
        """
        self._check_state("prepare()")
        with self._training.guard("prepare()"):
            self._training.attempt.prepare()

    def send_home(self, step: int) -> None:
        """Copy an older save of this attempt from `local` to home, in the background.

        Ranks: every rank calls it; not collective.
        """
        step, keeper = parse_step(step, "send_home()"), self._training.attempt.keeper
        if keeper is not None and keeper.config.local is not None:
            keeper.drain_checkpoint(CheckpointId(attempt=keeper.config.attempt, step=step))

    def wait(self, timeout: Duration | None = None) -> None:
        """Wait until everything saved so far is durable, and the newest save is in home.

        Args:
            timeout: seconds, or text such as "10m"; None for no limit.

        Raises:
            HoldfastError: the newest save failed.
            RetryLater: not within `timeout`; also a TimeoutError.

        Ranks: not collective, but waits for every rank's parts.
        Blocks: until the keepers are done.
        """
        with self._training.guard("wait()"):
            self._training.attempt.wait(parse_timeout(timeout, "wait()"))

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint of the run; None without one.

        The newest is the last one of the newest attempt. Its step may be smaller than an older attempt's.

        Raises:
            RetryLater: a store failed.
            Denied: a store refuses access.

        Ranks: not collective.
        Blocks: for a listing of home, and of the local folder.
        """
        newest = max(self._components.tiers.complete_checkpoints(), default=None)
        return None if newest is None else newest.step

    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints of the run, in ascending order.

        Raises:
            RetryLater: a store failed.
            Denied: a store refuses access.

        Ranks: not collective.
        Blocks: for a listing of home, and of the local folder.
        """
        return sorted({one.step for one in self._components.tiers.complete_checkpoints()})

    # -- restoring -------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        best: bool = False,
        healthy: bool = False,
        strict: bool = True,
        only: Collection[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> int | None:
        """Restore the newest checkpoint that verifies into the live objects.

        A loop of `steps` that follows begins at the same step, with the state as you leave it. This only
        reads, so another training may save to the same home meanwhile. The first `save` or `steps` claims the
        home.

        A `ResumeWarning` on rank 0 lists what differs from the checkpoint afterwards: tensors that were cast
        to the live dtype or are tied now, and with `strict=False` names that only one side has.

        Args:
            step: restore this step and no other.
            best: restore the checkpoint with the best value of the metric in `keep=Keep(metric=...)`. The
                next best is tried where one is damaged. Training continues from it as from `step`.
            healthy: restore the newest checkpoint that is marked as healthy: all tensors are finite, and
                norms, loss and gradients were within reason. Training continues from it as from `step`.
            strict: refuse a checkpoint whose names differ from the state's.
            only: top-level keys of the state to restore; the others stay as they are.
            rename: saved names to names in the state: a map of prefixes, or a function.

        Returns:
            The step restored, or None if the home holds no checkpoint.

        Raises:
            Corrupt: the home holds checkpoints, or signs that it held some, but none of them verifies.
                Nothing was restored for use.
            RetryLater: the newest checkpoint, or that of `step`, could not be read, see `Reads`.
            Denied: a store refuses access.
            InvalidInput: the checkpoint does not fit the state; the message lists the differences.
            NotFound: `step` has no checkpoint; or `best`, but no checkpoint has a value of the metric; or
                `healthy`, but none is marked so.

        Ranks: collective; all ranks restore the same checkpoint.
        Blocks: until the state is restored.
        """
        with self._training.guard("restore()", alone=True):
            if not self._components.has_state:
                raise InvalidInput(
                    "restore() fills the state of the Checkpointer, and this one was made without. Nothing "
                    "was read. Call load(), load(into=state), or continue_from()."
                )
            step = self._parse_choice("restore()", step, best=best, healthy=healthy)
            return self._training.restore(Selection(step, strict, only, rename, best, healthy))

    def load(
        self,
        step: int | None = None,
        *,
        into: MutableMapping[str, Any] | None = None,
        best: bool = False,
        healthy: bool = False,
        strict: bool = True,
        only: Collection[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        rng: bool = False,
    ) -> MutableMapping[str, Any] | None:
        """Load the newest checkpoint that verifies, for a Checkpointer that was made without a state.

        The next saves continue from it.

        Args:
            step: load this step and no other.
            into: objects to fill, as for the state of a Checkpointer: tensors and live objects in place, each
                rank its parts of DTensors; values are replaced in the mapping. By default the content is
                returned in new memory, whole tensors on the CPU.
            best: see `restore`.
            healthy: see `restore`.
            strict: refuse a checkpoint whose names differ from those of `into`.
            only: top-level keys to load.
            rename: saved names to names in `into`; see `restore`.
            rng: also restore the random number generators of python, numpy and torch.

        Returns:
            `into`, or a new dict; None if the home holds no checkpoint. `restored_step` is its step.

        Raises:
            HoldfastError: as `restore`.

        Ranks: collective; all ranks load the same checkpoint.
        Blocks: until it is loaded.
        """
        with self._training.guard("load()", alone=True):
            if self._components.has_state:
                raise InvalidInput(
                    "load() goes with a Checkpointer that was made without a state. Nothing was read. Call "
                    "restore(), or holdfast.open(home).load_into(state) to only look."
                )
            if rename is not None and into is None:
                raise InvalidInput("load(rename=...) needs into=, the objects with the new names.")
            step = self._parse_choice("load()", step, best=best, healthy=healthy)
            target: MutableMapping[str, Any] = {} if into is None else into
            selection = Selection(
                step, strict, only, rename, best, healthy, is_new=into is None, with_rng=rng
            )
            return target if self._training.load(selection, target) else None

    def continue_from(self, step: int | None = None, *, verify: bool = False) -> int | None:
        """Continue the run from its newest checkpoint, or that of `step`, without loading it.

        For objects that already have the content of that checkpoint, or shall not get it, or get it later
        piece by piece.

        Args:
            step: continue from this step and no other.
            verify: read and hash every byte, and skip a checkpoint that is damaged anywhere, as a restore of
                everything does. The ranks share the work.

        Returns:
            The step; None if the home holds no checkpoint.

        Raises:
            HoldfastError: as `restore`.

        Ranks: collective.
        Blocks: for the checkpoint's documents; with `verify` until everything has been read once.
        """
        with self._training.guard("continue_from()", alone=True):
            step = None if step is None else parse_step(step, "continue_from()")
            return self._training.restore(Selection(step, True, (), None, with_rng=False, verify=verify))

    def _parse_choice(self, call: str, step: int | None, *, best: bool, healthy: bool) -> int | None:
        """Check the choice of a checkpoint, and return its step, if given."""
        if (step is not None) + best + healthy > 1:
            raise InvalidInput(f"{call} takes step=, best=True or healthy=True, not both.")
        if not best:
            return None if step is None else parse_step(step, call)
        name = call.removesuffix("()")
        if self._components.options.keep.metric is None:
            raise InvalidInput(
                f"{name}(best=True) needs a metric: give the Checkpointer "
                'keep=Keep(best=1, metric="loss", mode="min"), and call record(loss=...).'
            )
        return None

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

    # -- ending ----------------------------------------------------------------------------------------------

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

    def close(self, timeout: Duration | None = None) -> None:
        """Save the last step, wait until everything saved is durable, and let the keeper end.

        The last step is saved if `should_save` was called with it and training has not continued since; not
        while an exception is being handled, and not after a loop over `steps` that an exception has ended.

        Args:
            timeout: seconds, or text such as "10m"; None for no limit.

        Raises:
            HoldfastError: the newest save failed.
            RetryLater: not durable within `timeout`; also a TimeoutError. The keeper continues by itself.

        Ranks: collective; no rank leaves while another still needs it.
        Blocks: until the keeper has ended, at most `timeout`, and until every rank has called it.
        """
        if self._training.is_open:
            self._training.close(parse_timeout(timeout, "close()"))

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._training.close(None, is_orderly=True)
        else:
            try:
                if self._training.is_open:
                    self._training.end_preempted(error)
            finally:
                self._training.abandon(kind.__name__)  # the exception must not wait for the keeper
