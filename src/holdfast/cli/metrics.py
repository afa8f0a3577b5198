"""`holdfast metrics`: prints, writes or serves live numbers of a run for Prometheus."""

from __future__ import annotations

import argparse
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from typing_extensions import override

from holdfast.checkpoint.restore.atomic_output import check_parent
from holdfast.checkpoint.store import Store
from holdfast.cli.commands import HOME, argument, command, either, step_number
from holdfast.cli.homes import open_home
from holdfast.cli.tables import print_json, print_result, write_output
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.watch.report.kept_readings import KeptReadings
from holdfast.watch.report.open_metrics import CONTENT_TYPE, format_metrics, metric_families
from holdfast.watch.report.summary import read_summary

_LEAST_AGE_S = 5.0
"""Age from which the numbers are read again when they are asked for."""
_IDLE_S = 60.0  # after which a client that sends nothing is left


@command(
    "metrics",
    """
    holdfast metrics runs/gpt
    holdfast metrics runs/gpt --output /var/lib/node_exporter/gpt.prom
    holdfast metrics runs/gpt --serve 9877
    """,
    *HOME,
    either(
        argument("-o, --output FILE", "write a file atomically, for node_exporter's textfile collector"),
        argument("--serve PORT", "serve the text over HTTP on 127.0.0.1 (0: any port)", step_number),
    ),
    details=(
        "The output is OpenMetrics text. Each metric has the label `home`. It is read from the "
        "history, also while the run trains, and the training is not disturbed. --serve listens on "
        "127.0.0.1 only, without a password, and runs until Ctrl-C."
    ),
)
def run(args: argparse.Namespace) -> None:
    """Print, write or serve the numbers of a run."""
    if args.output is not None:
        check_parent(Path(args.output))
    store, _ = open_home(args.home)
    if args.serve is not None:
        _serve(store, args)
    elif args.output is not None:
        write_output(args.output, _text(store), "the numbers to ")
    elif args.json:
        families = metric_families(read_summary(store), store.url)
        samples = [(family.name, *sample) for family in families for sample in family.samples]
        print_json([{"name": name, "labels": dict(of), "value": float(value)} for name, of, value in samples])
    else:
        sys.stdout.write(_text(store))


def _text(store: Store) -> str:
    return format_metrics(read_summary(store), store.url)


def _serve(store: Store, args: argparse.Namespace) -> None:
    try:
        server = ThreadingHTTPServer(("127.0.0.1", args.serve), _handler(store))
    except (OSError, OverflowError) as error:
        raise InvalidInput(f"Cannot listen on 127.0.0.1:{args.serve}: {error}.") from error
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    print_result(args, {"url": url, "port": server.server_port}, url)
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.server_close()


def _handler(store: Store) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests."""
    texts = KeptReadings[str](least_age_s=_LEAST_AGE_S)

    class Handler(BaseHTTPRequestHandler):
        """Reply to one request."""

        timeout = _IDLE_S

        def do_GET(self) -> None:
            """Send the numbers."""
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            try:
                body = texts.get(store.url, lambda: _text(store)).encode()
            except HoldfastError as error:
                self.send_error(503, explain=str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Ignore the request, since there is one every few seconds."""

    return Handler
