"""`holdfast dash`: shows jobs and runs in a browser."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from holdfast.checkpoint.store.factory import absolute_place, open_store
from holdfast.cli.commands import PATIENCE, argument, command, step_number
from holdfast.cli.tables import print_result


@command(
    "dash",
    """
    holdfast dash
    holdfast dash --port 8321 --no-browser runs/gpt s3://bucket/runs/bert
    ssh -t -L 8321:127.0.0.1:8321 HOST holdfast dash --port 8321
    """,
    argument("homes HOME", "run to show besides the jobs: its folder or URL", nargs="*"),
    argument("--port N", "port to listen on (default: any free one)", step_number, default=0),
    argument("--no-browser", "do not open a browser"),
    PATIENCE,
    details=(
        "It prints a URL for a browser of this machine, and runs until Ctrl-C. The page shows jobs, their "
        "attempts, live output, curves of metrics and reports, and changes nothing. The server listens on "
        "127.0.0.1, and only answers to browsers that have opened the URL, which contains a token. For a "
        "browser on another machine, forward the same port by ssh, as in the last example. "
        "Needs torch-holdfast[dash]."
    ),
)
def run(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    from holdfast.jobs.dash.application import Application, has_desktop, listen, opened
    from holdfast.jobs.dash.messages import AccessKeys

    homes = [absolute_place(place) for place in args.homes]
    for place in homes:
        open_store(place)  # checks the URL
    keys = AccessKeys()
    server, port = listen(Application(keys, homes), args.port)
    url = keys.url(port)
    try:
        print_result(args, {"url": url, "port": port}, url)
        sys.stdout.flush()
        note = "Ctrl-C ends it. The URL is a key to your jobs: do not pass it on."
        print(note, file=sys.stderr, flush=True)
        wants_browser = not args.no_browser and sys.stdout.isatty() and has_desktop(os.environ)
        with opened(url) if wants_browser else contextlib.nullcontext():
            server.run()
    except KeyboardInterrupt:
        print(file=sys.stderr)  # before the server ran
    finally:
        server.close()
