"""Entry point of a profile run: `python -m holdfast.train.tuning FOLDER` runs its script under a watcher."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from holdfast.system.process_exit import hard_exit
from holdfast.train.tuning import source_lines
from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.measurements import RunFailure, SourceLine
from holdfast.train.tuning.script_profile import RunSpec, read_spec, write_result
from holdfast.train.tuning.tracker import StepTracker, StopRun
from holdfast.train.tuning.watchers import make_watcher


def main(own: Path) -> int:
    """Run the script of a specification until its watcher has measured enough.

    Returns:
        Exit status; 0 if there are measurements.
    """
    spec = read_spec(own)
    is_first = os.environ.get("RANK", "0") == "0"
    compiled_at: list[SourceLine] = []
    _note_compile(compiled_at)
    _keep_saves(own / "saves")
    loaders = LoaderMonitor(spec.loader)
    results: list[Any] = []

    def receive(facts: Any) -> None:
        results.append(facts)
        if is_first:
            write_result(own, facts)

    tracker = StepTracker(make_watcher(spec, loaders, compiled_at), loaders, on_result=receive)
    tracker.start()
    has_failed = False
    try:
        with _raised_exits():
            _run(spec)
    except StopRun:
        pass
    except BaseException as error:  # noqa: BLE001 - the script's own error, which is printed
        is_end = isinstance(error, SystemExit) and error.code in (None, 0)
        if not results and not is_end:  # with results it is the script's reaction to its end
            traceback.print_exc()
            has_failed = True
    if not has_failed:
        tracker.stop()  # if the script ended by itself
        if not results and is_first:
            write_result(own, RunFailure("the script ended without an optimizer step"))
    return int(has_failed)


def _run(spec: RunSpec) -> None:
    """Run the script as `python SCRIPT ARGS` does."""
    path = Path(spec.script)
    sys.argv = [spec.script, *spec.args]
    sys.path.insert(0, str(path.resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = spec.script
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module  # pickle looks up the script's classes there
    exec(compile(path.read_bytes(), str(path.resolve()), "exec"), module.__dict__)


@contextlib.contextmanager
def _raised_exits() -> Iterator[None]:
    """Raise SystemExit where the script's main thread ends the process by `os._exit`, as `hard_exit` does."""
    leave, own = os._exit, os.getpid()

    def leaving(status: int) -> None:
        if os.getpid() == own and threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
        leave(status)

    os._exit = leaving
    try:
        yield
    finally:
        os._exit = leave


def _note_compile(found: list[SourceLine]) -> None:
    """Record the line of every call of torch.compile by the script."""
    before = torch.compile

    def noting(*args: Any, **kwargs: Any) -> Any:
        place = source_lines.current_line()
        if place is not None and not source_lines.is_running("/torch/_inductor/", "/torch/_dynamo/"):
            found.append(place)
        return before(*args, **kwargs)

    torch.compile = noting


def _keep_saves(folder: Path) -> None:
    """Redirect `torch.save` to a folder of the run, and `torch.load` of these files too."""
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
    hard_exit(status)
