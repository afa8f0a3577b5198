from __future__ import annotations

import gc
import signal
import socket
import threading

import pytest

from holdfast.checkpoint.keeper.messages import Ping
from holdfast.checkpoint.keeper.packets import Outbox

NUM_INTERRUPTS = 3000


class Interrupted(BaseException):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_place_leaves_no_lock_taken() -> None:
    """Ctrl+C raises KeyboardInterrupt anywhere in the main thread; the copying thread still has to send."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outbox = Outbox(ours)

    def receive() -> None:
        while theirs.recv(1 << 16):
            pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    def send_often() -> None:
        for _ in range(10_000):  # some interrupts are lost, within a destructor
            outbox.send(Ping())

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    before = signal.signal(signal.SIGALRM, interrupt)
    num_interrupted = 0
    gc.disable()  # an interrupt within a callback of the collector is lost
    try:
        while num_interrupted < NUM_INTERRUPTS:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003)
                send_often()
            except Interrupted:
                num_interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    sender = threading.Thread(target=outbox.send, args=(Ping(),), daemon=True)
    sender.start()
    sender.join(60)
    assert not sender.is_alive(), "the interrupted thread has left the lock taken"
    outbox.close()
    ours.close()
    receiver.join()
    theirs.close()
