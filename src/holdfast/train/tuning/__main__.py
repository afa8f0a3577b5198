"""Entry of a rehearsal: `python -m holdfast.train.tuning FOLDER` runs the script of that plan, watched."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import torch

from holdfast.ending import leave
from holdfast.train.tuning import places
from holdfast.train.tuning.facts import Place, plain
from holdfast.train.tuning.graphs import GraphWatch
from holdfast.train.tuning.loaders import Loaders, Settings
from holdfast.train.tuning.probe import Enough, Probe, Watcher
from holdfast.train.tuning.racing import Racing
from holdfast.train.tuning.rehearsal import Plan, read_plan, tell
from holdfast.train.tuning.stepping import Stepping
from holdfast.train.tuning.syncs import SyncWatch

_FAILED = 1


def main(own: Path) -> int:
    """Run the script of a plan until its watcher has seen enough.

    Returns:
        Exit status; 0 if something was seen.
    """
    plan = read_plan(own)
    is_first = os.environ.get("RANK", "0") == "0"
    compiled_at: list[Place] = []
    _note_compile(compiled_at)
    _keep_saves(own / "saves")
    settings = None if plan.loader is None else Settings(plan.loader, plan.num_workers, plan.batch_size)
    loaders = Loaders(settings)
    told: list[Any] = []

    def hear(facts: Any) -> None:
        told.append(facts)
        if is_first:
            tell(own, {"facts": plain(facts)})

    probe = Probe(_watcher(plan, loaders, compiled_at), loaders, told=hear)
    probe.start()
    status = 0
    try:
        _run(plan)
    except Enough:
        pass
    except SystemExit as left:
        if not told and left.code not in (None, 0):
            traceback.print_exc()
            status = _FAILED
    except BaseException:  # noqa: BLE001 - the script's, which is shown
        if not told:  # else it is no more than how the script takes its end
            traceback.print_exc()
            status = _FAILED
    if not status and not probe.is_done:
        probe.stop()  # the script has ended by itself
    if not told and not status and is_first:
        tell(own, {"trouble": "the script ended without one step of an optimizer"})
    return status


def _watcher(plan: Plan, loaders: Loaders, compiled_at: list[Place]) -> Watcher:
    if plan.question == "steps":
        return Stepping(plan.num_steps, loaders, compiled_at=compiled_at)
    if plan.question == "syncs":
        return SyncWatch(plan.num_steps)
    if plan.question == "graphs":
        return GraphWatch(plan.num_steps, compiles_itself=plan.compiles_itself)
    return Racing(plan.variant, plan.num_steps)


def _run(plan: Plan) -> None:
    """Run the script as `python SCRIPT ARGS` would."""
    path = Path(plan.script)
    sys.argv = [plan.script, *plan.args]
    sys.path.insert(0, str(path.resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = plan.script
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module  # what the script pickles is looked for there
    exec(compile(path.read_bytes(), str(path.resolve()), "exec"), module.__dict__)


def _note_compile(found: list[Place]) -> None:
    """Have every call of torch.compile by the script leave its place."""
    before = torch.compile

    def noting(*args: Any, **kwargs: Any) -> Any:
        place = places.here()
        if place is not None and not places.is_running("/torch/_inductor/", "/torch/_dynamo/"):
            found.append(place)
        return before(*args, **kwargs)

    torch.compile = noting


def _keep_saves(folder: Path) -> None:
    """Have `torch.save` write to a folder of the rehearsal, and `torch.load` read back what went there."""
    save, load = torch.save, torch.load
    moved: dict[str, str] = {}

    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            folder.mkdir(exist_ok=True)
            key = str(Path(f).resolve())
            f = moved.setdefault(key, str(folder / f"{os.getpid()}-{len(moved)}"))
        return save(obj, f, *args, **kwargs)

    def loading(f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            f = moved.get(str(Path(f).resolve()), f)
        return load(f, *args, **kwargs)

    torch.save, torch.load = saving, loading


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    gc.collect()  # workers of loaders end with their iterators
    leave(status)
