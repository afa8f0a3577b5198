"""Subscription of a job: its commands and webhooks, and the statuses that are sent to them."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.errors import InvalidInput
from holdfast.jobs.status import FINAL, JobStatus
from holdfast.system.environment import NOTIFY, NOTIFY_ON

GROUPS = {
    "ended": FINAL,
    "failed": frozenset({JobStatus.FAILED, JobStatus.FAILED_SETUP, JobStatus.FAILED_CONTROLLER}),
}
"""Names for several statuses."""
DEFAULT = ("ended", "recovering")  # statuses that are sent unless others are chosen
_MAX_TARGETS = 16
_MAX_CHARACTERS = 8192


@dataclass(frozen=True, slots=True)
class Subscription:
    """Targets of notifications, and the statuses to send."""

    targets: tuple[str, ...] = field(default=(), repr=False)  # shell commands and URLs, with secrets
    statuses: frozenset[JobStatus] = frozenset()


def subscribe(targets: Sequence[str] | None, statuses: Sequence[str] | None) -> Subscription:
    """Return the subscription of a launch. None stands for the variables of the environment, or a default."""
    is_chosen = targets is not None
    chosen = os.environ.get(NOTIFY, "").splitlines() if targets is None else _listed(targets)
    found = tuple(target.strip() for target in chosen if target.strip() or is_chosen)
    source = "--notify" if is_chosen else NOTIFY
    for number, target in enumerate(found, 1):
        if why := _problem(target):
            raise InvalidInput(f"{source}, number {number}: {why}. Nothing was started.")
    if len(found) > _MAX_TARGETS:
        what = f"expected at most {_MAX_TARGETS}, found {len(found)}"
        raise InvalidInput(f"{source}: {what}. Nothing was started.")
    if not found and statuses is not None:
        raise InvalidInput(f"--notify-on needs --notify, or the variable {NOTIFY}. Nothing was started.")
    if not found:
        return Subscription()
    if statuses is not None:
        return Subscription(found, _statuses(_listed(statuses), "--notify-on"))
    named = os.environ.get(NOTIFY_ON, "").strip()
    return Subscription(found, _statuses([named] if named else DEFAULT, NOTIFY_ON))


def _listed(words: Sequence[str]) -> Sequence[str]:
    """Return a sequence of words. A text is one word, not its letters."""
    return [words] if isinstance(words, str) else words


def is_webhook(target: str) -> bool:
    """Return True for a URL, and False for a command."""
    return target.lower().startswith(("http://", "https://"))


def label(target: str, number: int) -> str:
    """Return the public name of a target, from its position. The target itself is a secret."""
    return f"{'webhook' if is_webhook(target) else 'command'} {number + 1}"


def _problem(target: str) -> str:
    """Return why a target is invalid, without its text; empty if it is valid."""
    if not target or len(target) > _MAX_CHARACTERS or "\0" in target:
        return f"expected a command or URL of 1 to {_MAX_CHARACTERS} characters"
    scheme = target.partition("://")[0]
    if "://" in target and scheme.isalnum() and not is_webhook(target):
        return "expected a command or a URL that begins with http:// or https://, found another scheme"
    if not is_webhook(target):
        return ""
    if not target.isascii() or not target.isprintable() or " " in target:
        return "expected a URL of printable ASCII characters without spaces"
    try:
        url = urllib.parse.urlsplit(target)
        has_host = bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        has_host = False
    if not has_host or "@" in target.partition("://")[2].partition("/")[0]:
        return "expected a URL with a host, and without a user and password"
    return ""


def _statuses(words: Sequence[str], source: str) -> frozenset[JobStatus]:
    found: set[JobStatus] = set()
    for name in (name.strip().lower() for word in words for name in word.split(",")):
        known = {one.value.lower(): one for one in JobStatus if one is not JobStatus.PENDING}
        if name not in GROUPS and name not in known:
            raise InvalidInput(
                f"{source}: unknown status {name[:100]!r}. Expected some of: {', '.join([*GROUPS, *known])}. "
                "Nothing was started."
            )
        found |= GROUPS.get(name) or {known[name]}
    return frozenset(found)
