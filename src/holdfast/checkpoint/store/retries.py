"""Retries of requests to an object store while failures may pass, until a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.checkpoint.store.address import S3, Address
from holdfast.checkpoint.store.client_errors import ClientError, classify
from holdfast.checkpoint.store.clients import Clients, ask_region, region_of
from holdfast.checkpoint.store.command_limit import command_limit
from holdfast.checkpoint.store.error_codes import REGION, ErrorKind
from holdfast.errors import Denied, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.system import backoff
from holdfast.system.units import format_duration, plural

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_T = TypeVar("_T")


class TryAgain(Exception):
    """Request for another try, raised from the client's error."""


@dataclass(slots=True)
class StoreRequest:
    """One request to a store.

    `verb` - the action, for messages. `name` - the object, or a prefix. `num_bytes` - size of its data.
    `limit_s` - time limit of its retries, or None for the address's.
    """

    verb: str
    name: str
    num_bytes: int | None = None
    limit_s: float | None = None
    num_tries: int = 0
    began_s: float = field(default_factory=time.monotonic)


class Retries:
    """Sender of requests to an address: retries transient failures, and reads credentials again once."""

    def __init__(self, address: Address, clients: Clients) -> None:
        self._address = address
        self._clients = clients

    def call(
        self,
        request: StoreRequest,
        act: Callable[[Any], _T],
        *,
        retrying: bool = False,
        past_end: _T | None = None,
    ) -> _T:
        """Return the result of `act`, repeated while failures may pass and the time limit allows.

        Args:
            request: for messages and the limit.
            act: makes the requests with a given client.
            retrying: use the client that retries by itself.
            past_end: the result if the object ends before the requested range.

        Raises:
            HoldfastError: the error of `failure` for the store's answer, or the one that `act` raised.
        """
        with command_limit.reporting(self._address.place):
            return self._call(request, act, retrying=retrying, past_end=past_end)

    def _call(
        self, request: StoreRequest, act: Callable[[Any], _T], *, retrying: bool, past_end: _T | None
    ) -> _T:
        is_renewed = False
        while True:
            request.num_tries += 1
            client = self._clients.get(retrying=retrying)
            try:
                return act(client)
            except HoldfastError:
                raise
            except TryAgain as error:
                client_error = ClientError(ErrorKind.PASSING, str(error))
            except self._clients.client_errors as error:
                client_error = classify(error)
            if client_error.kind is ErrorKind.PAST_END and past_end is not None:
                return past_end
            if client_error.kind is ErrorKind.DENIED and not is_renewed:
                is_renewed = True  # keys may have been renewed since the client read them
                self._clients.drop()
                continue
            pause_s = backoff.jittered(backoff.doubled(request.num_tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            is_over = time.monotonic() + pause_s > request.began_s + self._limit_s(request)
            if client_error.kind is not ErrorKind.PASSING or is_over:
                raise self.failure(request, client_error) from None  # its text may hold secrets
            time.sleep(pause_s)

    def failure(self, request: StoreRequest, client_error: ClientError) -> HoldfastError:
        """Return the error to raise for a client error."""
        name, verb, kind = request.name, request.verb, client_error.kind
        if kind is ErrorKind.ABSENT and verb != "write":
            return not_found(self._address, name)
        bytes_of = "" if request.num_bytes is None else f" ({request.num_bytes} bytes)"
        failed = f"Could not {verb} {self._address.place}/{name}{bytes_of}: {client_error.reason}."
        if kind in (ErrorKind.NO_BUCKET, ErrorKind.ABSENT):  # a write can only miss its bucket
            advice = (
                f"The bucket {self._address.bucket!r} does not exist. Create it, or correct URL or endpoint."
            )
            return (RetryLater if verb == "write" else NotFound)(f"{failed} {advice}", key=name)
        if kind is ErrorKind.NAME:
            return InvalidInput(f"{failed} Objects cannot have this name.", key=name)
        if kind is ErrorKind.NOT_OFFERED:
            return Unsupported(f"{failed} This server does not support it.", key=name)
        if kind in (ErrorKind.DENIED, ErrorKind.CLOCK, ErrorKind.MISCONFIGURED, ErrorKind.FULL):
            advice = client_error.advice
            if advice is REGION and self._address.protocol == S3:
                advice = self._right_region(client_error)
            return Denied(f"{failed} {advice}", key=name)
        tried = f"Given up after {format_duration(time.monotonic() - request.began_s)}"
        tries, limit_s = plural(request.num_tries, "try", "tries"), self._limit_s(request)
        limit = f" and {tries} (limit {format_duration(limit_s)})"
        return RetryLater(f"{failed} {tried}{limit if kind is ErrorKind.PASSING else ''}.", key=name)

    def _right_region(self, client_error: ClientError) -> str:
        """Return the region that the store names, and how to use it."""
        used = region_of(self._address) or "us-east-1, the default"
        region = client_error.region or (ask_region(client_error.url) if client_error.url else "")
        if not region:
            return f"{REGION} This request was for {used}: set `region=` in the URL, or correct its endpoint."
        return (
            f"The bucket is in region {region}, and this request was for {used}. Append `region={region}` "
            f"to the options of the URL, or set AWS_REGION={region}."
        )

    def _limit_s(self, request: StoreRequest) -> float:
        limit_s = self._address.timeout_s if request.limit_s is None else request.limit_s
        if command_limit.limit_s is None or self._address.option("timeout") is not None:
            return limit_s
        return min(limit_s, command_limit.limit_s)


def not_found(address: Address, name: str) -> NotFound:
    """Return the error for an object that does not exist."""
    return NotFound(f"{address.place}/{name} does not exist.", key=name)
