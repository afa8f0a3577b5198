"""Names and texts that Kubernetes accepts, and errors about a key of a task file; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from typing_extensions import override

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.task.model import Task

POD_CONFIG = "config.kubernetes.pod_config"  # the user's own settings of pods, in SkyPilot's form
_MAX_NAME = 40  # longest name of a job: pods and services append to it, and have at most 63 characters
_LABEL_KEY = re.compile(
    r"(?:(?=.{1,253}/)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/)?(?=.{1,63}$)\w(?:[\w.-]*\w)?", re.A
)
_LABEL_VALUE = re.compile(r"(?=.{0,63}$)(?:\w(?:[\w.-]*\w)?)?", re.A)
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")


def invalid(task: Task, key: str, what: str) -> InvalidInput:
    """Return the error for an invalid value."""
    return InvalidInput(f"{task.where(key)}: {what} Nothing was started.")


def unsupported(task: Task, key: str, what: str) -> Unsupported:
    """Return the error for a key that Kubernetes cannot provide; see `invalid`."""
    return Unsupported(f"{task.where(key)}: {what} Nothing was started.")


def object_name(task: Task) -> str:
    """Return the name of a task's job: a DNS label that begins with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")
    found = plain if plain[:1].isalpha() else f"job-{plain}".rstrip("-")
    # A shortened name could be that of another job, whose checkpoints this one would then continue.
    if not plain or len(found) > _MAX_NAME:
        what = (
            f"expected a name of at most {_MAX_NAME} letters, digits and dashes, found {task.name[:100]!r}. "
            "Give another one with --name."
        )
        raise invalid(task, "name", what)
    return found


def labels(task: Task) -> dict[str, str]:
    """Return the labels of a task's objects: Holdfast's, and those in `resources.labels`."""
    ours = {"app.kubernetes.io/name": object_name(task), "app.kubernetes.io/managed-by": "holdfast"}
    asked = (task.document.get("resources") or {}).get("labels") or {}
    for key, plain in asked.items():
        value = "" if plain is None else str(plain)
        if not _LABEL_KEY.fullmatch(str(key)) or not _LABEL_VALUE.fullmatch(value):
            what = f"expected a label that Kubernetes accepts, found {str(key)[:100]!r}: {value[:100]!r}."
            raise invalid(task, "resources.labels", what)
        ours.setdefault(str(key), value)
    return ours


def is_subdomain(name: str) -> bool:
    """Return True if an object of Kubernetes may have this name."""
    return _SUBDOMAIN.fullmatch(name) is not None


# Readers differ about words such as y, on and 1e3. So only words that cannot be anything else are not quoted.
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.A)
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"))
_OTHER_BREAKS = re.compile("[\r\x85\u2028\u2029]")  # line breaks in YAML 1.1 only
_NEVER_FOLDED = 10**9
_REPLACED = re.compile(r"\$(?=[$(])")


class _Dumper(yaml.SafeDumper):
    """Dumper without anchors that quotes text unless it cannot be anything else."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> Any:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    is_block = "\n" in text and not _OTHER_BREAKS.search(text)
    style = "|" if is_block else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def to_manifest(document: Mapping[str, Any], comments: Iterable[str]) -> str:
    """Return a manifest that begins with comments."""
    body = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NEVER_FOLDED)
    return "".join(f"# {line}\n" for line in comments) + body


def escape(text: str) -> str:
    """Return text that Kubernetes turns back into `text`: it replaces `$(NAME)`, and `$$` by `$`."""
    return _REPLACED.sub("$$", text)
