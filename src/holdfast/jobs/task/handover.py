"""Writes a task as the YAML file that SkyPilot's own parser takes."""

from __future__ import annotations

from typing import Any

import yaml

from holdfast.jobs.task.contents import Task


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, so that people can read what was handed over."""


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(task: Task) -> str:
    """The normalised file: what the user wrote, with variables filled in and accelerators in a plain form.

    Secrets stand there without values: they are to be given to `sky` with `--secret NAME`.
    """
    return yaml.dump(dict(task.document), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
