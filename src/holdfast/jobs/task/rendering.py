"""A task as YAML that SkyPilot's own parser accepts."""

from __future__ import annotations

from typing import Any

import yaml

from holdfast.jobs.task.model import Task


class _Dumper(yaml.SafeDumper):
    """Dumper that writes scripts as blocks, so that they are readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(task: Task) -> str:
    """Return the normalized file, with variables filled in and accelerators in a plain form.

    Secrets have no values, as `sky` receives these with `--secret NAME`.
    """
    return yaml.dump(dict(task.document), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
