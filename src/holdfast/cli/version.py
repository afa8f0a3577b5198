"""`holdfast version`: shows the versions and the machine that the report of a problem needs."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from holdfast import __version__
from holdfast.cli.commands import command
from holdfast.cli.tables import print_fields, print_result

_PACKAGES = ("torch", "numpy", "msgspec", "xxhash", "obstore", "transformers", "accelerate", "lightning")


@command("version", "holdfast version\nholdfast version --json")
def run(args: argparse.Namespace) -> None:
    """Print versions, without an import of any package. Nothing names the user or the machine."""
    found = {"holdfast": __version__, "python": platform.python_version()}
    found |= {name: _installed(name) for name in _PACKAGES}
    found |= {"system": platform.system(), "release": platform.release(), "machine": platform.machine()}
    print_result(args, found, lambda: print_fields((name, text or "-") for name, text in found.items()))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
