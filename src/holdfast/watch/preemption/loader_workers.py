"""Protection of PyTorch's data loader workers from signals that a whole process group receives."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import queue
import signal
import sys
import weakref
from collections.abc import Callable, Collection
from multiprocessing import resource_tracker, util
from types import FrameType
from typing import Any, NoReturn

from holdfast.watch.preemption.signals import SIGNALS

_ITERATORS = (
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter"),
    ("torchdata.stateful_dataloader.stateful_dataloader", "_StatefulMultiProcessingDataLoaderIter"),
)
_FORK_SERVER = "holdfast.watch.preemption.fork_server"
_protected: set[type] = set()
_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # processes that leave the signals to the trainer
_at_exit: list[util.Finalize] = []  # the call of `_end_workers`


def protect_workers() -> None:
    """Protect the workers of all data loaders, new and existing ones.

    The step that a trainer finishes after a notice still needs its batches, so workers leave the signals to
    the trainer: new ones from their start, and existing ones once they have loaded what they were asked for
    before.

    Blocks: with child processes, once for a scan of all objects, about 0.1 s for a million.
    """
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in _ITERATORS]
    for kind in kinds:
        if kind is not None and kind not in _protected:
            _protected.add(kind)
            _protect(kind)
            for referrer in gc.get_referrers(kind) if multiprocessing.active_children() else ():
                if type(referrer) is kind:
                    _protect_running(referrer)


class _Protection:
    """Message to a worker that runs, in place of the numbers of samples to load.

    The worker calls `_prepare_running` where it unpickles the message, in its main thread.
    """

    def __reduce__(self) -> tuple[Callable[[], NoReturn], tuple[()]]:
        return _prepare_running, ()


def _protect_running(iterator: Any) -> None:
    for worker, indices in zip(iterator._workers, iterator._index_queues, strict=True):
        is_own = worker._parent_pid == os.getpid()  # not inherited by a fork
        if is_own and worker.is_alive() and not iterator._shutdown:
            indices.put(_Protection())
            _adopt(worker)


def _prepare_running() -> NoReturn:
    """Leave the signals to the trainer, in a worker."""
    _leave_signals()
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid != os.getppid():
        # The notice ends the fork server, whose end the worker would take for that of the trainer.
        ManagerWatchdog: Any = importlib.import_module("torch.utils.data._utils.worker").ManagerWatchdog
        ManagerWatchdog.is_alive = lambda _: trainer.is_alive()
    raise queue.Empty


def _adopt(worker: Any) -> None:
    """Have a worker ended with SIGKILL, as it leaves SIGTERM to the trainer."""
    if not _at_exit:
        # Before multiprocessing sends them SIGTERM and waits.
        _at_exit.append(util.Finalize(None, _end_workers, exitpriority=100))
    worker.terminate = worker.kill
    _workers.add(worker)


def _protect(kind: Any) -> None:
    """Have the workers of new iterators protected. PyTorch has no hook for that."""
    begin = kind.__init__

    @functools.wraps(begin)
    def begin_protected(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        own = loader.worker_init_fn
        _prepare_start(loader)
        # A process inherits the mask, so no signal ends a worker before its first function is called.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            blocked = [one for one in SIGNALS if one not in mask]
            loader.worker_init_fn = functools.partial(_begin_worker, own, blocked)
            begin(self, loader, *args, **kwargs)
        finally:
            loader.worker_init_fn = own
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for worker in self._workers:
            _adopt(worker)

    kind.__init__ = begin_protected


def _prepare_start(loader: Any) -> None:
    """Prepare multiprocessing for a start of processes with blocked signals."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()  # its own start unblocks signals
    if method == "forkserver":
        server: Any = importlib.import_module("multiprocessing.forkserver")._forkserver
        if _FORK_SERVER not in server._preload_modules:
            server._preload_modules = [*server._preload_modules, _FORK_SERVER]


def _begin_worker(own: Callable[[int], None] | None, blocked: Collection[int], worker_id: int) -> None:
    """Leave the signals to the trainer, also those blocked until now, then call the user's first function."""
    _leave_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    if own is not None:
        own(worker_id)


def _leave_signals() -> None:
    """Leave the signals to the trainer. PyTorch has installed its own handler of SIGTERM before."""
    for number in SIGNALS:
        plain = signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
        if number == signal.SIGTERM or plain:
            signal.signal(number, _leave_to_the_trainer)


def _leave_to_the_trainer(number: int, frame: FrameType | None) -> None:
    """Do nothing while there is a trainer. Child processes of a worker would inherit SIG_IGN."""
    trainer = multiprocessing.parent_process()
    if trainer is not None and not trainer.is_alive():
        os._exit(0)


def _end_workers() -> None:
    """Kill all workers, as they leave SIGTERM to the trainer."""
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise an error
    for worker in list(_workers):
        worker.kill()


def _forget_workers() -> None:
    _workers.clear()
    _at_exit.clear()


os.register_at_fork(after_in_child=_forget_workers)
