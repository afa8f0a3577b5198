"""Program that installs pip into the environment of a job, and runs it. Copied as `pip/__main__.py`.

It is used where the parent environment does not have pip. This file imports only what every Python has, and
nothing of Holdfast.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import subprocess
import sys


def main() -> None:
    """Install pip into the environment of this Python, in the place of this file, and run it."""
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            "holdfast: pip is not installed where this job was launched, and Python cannot install it, as it "
            "lacks `ensurepip`. Install pip (on Debian: apt install python3-pip or python3-venv) and launch "
            "the job again, or use `uv pip install`."
        )
    command = [sys.executable, "-I", "-m", "ensurepip", "--default-pip"]
    if status := subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        sys.exit(status)
    importlib.invalidate_caches()
    sys.modules.pop("pip", None)  # this file's package
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
