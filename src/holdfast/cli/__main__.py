"""Entry of `python -m holdfast.cli`, the same as the `holdfast` command."""

import sys

from holdfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
