"""The Checkpointer: options, the training loop, and the calls that save, restore, wait and end."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.policy import Every, single_policies
from holdfast.checkpoint.ranks import RankGroup
from holdfast.checkpoint.restore.candidates import Selection
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.loop import TrainingLoop
from holdfast.checkpoint.run.options import Home, Limits, Local, Memory, Options, Peers, Reads, parse_home
from holdfast.checkpoint.run.training import Training
from holdfast.checkpoint.run.watching import choose_watches
from holdfast.checkpoint.watch import Watch
from holdfast.errors import InvalidInput
from holdfast.system.units import Duration, parse_step, parse_timeout


class Checkpointer(TrainingLoop):
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
        peers: number of other hosts that hold a copy of each save in memory, or `Peers`: then the loss of a
            host costs no more than the steps since the last copy.
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
        peers: int | Peers | None = None,
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
            keep=keep if isinstance(keep, Keep) else Keep(keep),
            local=local if local is None or isinstance(local, Local) else Local(local),
            memory=memory if isinstance(memory, Memory) else Memory(memory),
            peers=Peers(peers) if isinstance(peers, int) and peers else peers or None,
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

    def send_home(self, step: int, *, attempt: int | None = None) -> None:
        """Copy an older save from `local` to home, in the background.

        Args:
            attempt: of the save; None for this one.

        Raises:
            HoldfastError: the last such copy of this step failed, or a newer attempt has claimed the run.

        Ranks: every rank calls it; not collective.
        """
        step, keeper = parse_step(step, "send_home()"), self._training.attempt.keeper
        if keeper is not None and keeper.config.local is not None:
            keeper.drain_checkpoint(CheckpointId(attempt=attempt or keeper.config.attempt, step=step))

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
            return self._training.restore(Selection(step, only=(), with_rng=False, verify=verify))

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

    # -- ending ----------------------------------------------------------------------------------------------
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
