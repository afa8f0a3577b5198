"""Asks an object store again while its refusals may pass, until a time limit, and tells what it said."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.errors import Denied, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.store.address import Address
from holdfast.store.clients import Clients
from holdfast.store.haste import haste
from holdfast.store.refusals import Kind, Refusal, classify
from holdfast.units import format_duration, plural

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_T = TypeVar("_T")
_dice = random.Random()  # our own: the module's belongs to the training, which must not draw other numbers


class TryAgain(Exception):
    """A refusal that is no answer, raised from the client's error."""


@dataclass(slots=True)
class Request:
    """What is wanted of a store.

    `verb` - what is done to the object, for messages. `name` - the object, or a prefix. `num_bytes` - how
    many bytes it is about. `limit_s` - how long it is tried, None for the address's limit.
    """

    verb: str
    name: str
    num_bytes: int | None = None
    limit_s: float | None = None
    num_tries: int = 0
    began_s: float = field(default_factory=time.monotonic)


class Retries:
    """How requests to an address are made: again after failures that may pass, with keys read anew once."""

    def __init__(self, address: Address, clients: Clients) -> None:
        self._address = address
        self._clients = clients

    def ask(
        self,
        request: Request,
        act: Callable[[Any], _T],
        *,
        patient: bool = False,
        past_end: _T | None = None,
    ) -> _T:
        """What `act` answers, asked again while its failures may pass and the time limit allows it.

        Args:
            request: what is wanted, for messages and the limit.
            act: makes the requests with the client that it is given.
            patient: whether the client itself tries requests again.
            past_end: the answer where the object ends before the range that was asked for.

        Raises:
            HoldfastError: what `failure` makes of the store's answer, or what `act` raised.
        """
        with haste.saying(self._address.place):
            return self._ask(request, act, patient=patient, past_end=past_end)

    def _ask(self, request: Request, act: Callable[[Any], _T], *, patient: bool, past_end: _T | None) -> _T:
        is_renewed = False
        while True:
            request.num_tries += 1
            client = self._clients.get(patient=patient)
            try:
                return act(client)
            except HoldfastError:
                raise
            except TryAgain as error:
                refusal = Refusal(Kind.PASSING, str(error))
            except self._clients.refusals as error:
                refusal = classify(error)
            if refusal.kind is Kind.PAST_END and past_end is not None:
                return past_end
            if refusal.kind is Kind.CREDENTIALS and not is_renewed:
                is_renewed = True  # keys may have been renewed since the client has read them
                self._clients.drop()
                continue
            pause_s = _pause_s(request.num_tries)
            is_over = time.monotonic() + pause_s > request.began_s + self._limit_s(request)
            if refusal.kind is not Kind.PASSING or is_over:
                raise self.failure(request, refusal) from None  # its text may hold secrets
            time.sleep(pause_s)

    def failure(self, request: Request, refusal: Refusal) -> HoldfastError:
        """The error that tells a refusal."""
        name, verb, kind = request.name, request.verb, refusal.kind
        if kind is Kind.ABSENT and verb != "write":
            return not_found(self._address, name)
        bytes_of = "" if request.num_bytes is None else f" ({request.num_bytes} bytes)"
        failed = f"Could not {verb} {self._address.place}/{name}{bytes_of}: {refusal.why}."
        if kind in (Kind.NO_BUCKET, Kind.ABSENT):  # a write misses nothing but its bucket
            advice = f"There is no bucket {self._address.bucket!r}; create it, or correct URL or endpoint."
            return (RetryLater if verb == "write" else NotFound)(f"{failed} {advice}", key=name)
        if kind is Kind.NAME:
            return InvalidInput(f"{failed} An object store takes no such name.", key=name)
        if kind is Kind.NOT_OFFERED:
            return Unsupported(f"{failed} This server does not offer that.", key=name)
        if kind is Kind.CREDENTIALS:
            advice = (
                "The store did not accept our credentials, or they do not allow this; they were read anew "
                "once. If they have expired, renew them: the next try takes what is there then."
            )
            return Denied(f"{failed} {advice}", key=name)
        tried = f"Given up after {format_duration(time.monotonic() - request.began_s)}"
        tries, limit_s = plural(request.num_tries, "try", "tries"), self._limit_s(request)
        limit = f" and {tries} (limit {format_duration(limit_s)})"
        return RetryLater(f"{failed} {tried}{limit if kind is Kind.PASSING else ''}.", key=name)

    def _limit_s(self, request: Request) -> float:
        limit_s = self._address.timeout_s if request.limit_s is None else request.limit_s
        if haste.limit_s is None or self._address.option("timeout") is not None:
            return limit_s
        return min(limit_s, haste.limit_s)


def not_found(address: Address, name: str) -> NotFound:
    """The error for an object that is not there."""
    return NotFound(f"{address.place}/{name} does not exist.", key=name)


def _pause_s(num_tries: int) -> float:
    """A random pause that doubles its mean with each try, so that many ranks do not come back together."""
    longest_s = min(_FIRST_PAUSE_S * 2.0 ** min(num_tries - 1, 30), _LONGEST_PAUSE_S)
    return _dice.uniform(0.5, 1.0) * longest_s
