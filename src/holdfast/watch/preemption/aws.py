"""Preemption notices of AWS: spot interruptions and rebalance recommendations, from IMDSv2."""

from __future__ import annotations

import time

from typing_extensions import override

from holdfast.errors import Corrupt
from holdfast.system.documents import decode_object
from holdfast.watch.preemption.cloud import Cloud
from holdfast.watch.preemption.metadata import Response, Unreachable, request
from holdfast.watch.preemption.notice import Notice, parse_time

BASE = "http://169.254.169.254"
_TOKEN_S = 3600


class Aws(Cloud):
    """Source of spot interruptions and rebalance recommendations. The latter ask for one save only.

    Source: EC2 user guide, "Spot Instance interruption notices"; aws-node-termination-handler.
    """

    name = "aws"
    pause_s = 5.0  # as the user guide recommends

    def __init__(self, base: str = BASE) -> None:
        self._base = base
        self._token: str | None = None
        self._token_until_s = 0.0
        self._has_rebalanced = False

    @override
    def poll(self) -> Notice | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            return _parse_action(action)
        if self._has_rebalanced:
            return None
        recommendation = self._get("/latest/meta-data/events/recommendations/rebalance")
        if recommendation is None:
            return None
        self._has_rebalanced = True  # the document is never withdrawn, and one save for it is enough
        return Notice("aws", "rebalance recommendation", is_final=False)

    def _get(self, path: str) -> str | None:
        """Return the document at `path`, or None if it does not exist (404)."""
        response = self._authorized(path)
        if response.status == 401:  # the token has expired, or another one was made for the machine
            self._token = None
            response = self._authorized(path)
        if response.status == 404:
            return None
        if response.status != 200:
            raise Unreachable(f"{self._base}{path}: status {response.status}")
        return response.text

    def _authorized(self, path: str) -> Response:
        if self._token is None or time.monotonic() > self._token_until_s:
            self._token = self._new_token()
        return request(self._base, path, headers={"X-aws-ec2-metadata-token": self._token})

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S), "Content-Length": "0"}
        response = request(self._base, "/latest/api/token", method="PUT", headers=headers)
        if response.status != 200:
            raise Unreachable(f"{self._base}/latest/api/token: status {response.status}")
        self._token_until_s = time.monotonic() + _TOKEN_S * 0.9
        return response.text.strip()


def _parse_action(text: str) -> Notice:
    try:
        document = decode_object(text, "the notice")
        time_text = document.text("time", max_chars=64) if "time" in document else ""
        return Notice("aws", f"spot {document.text('action', max_chars=64)}", parse_time(time_text))
    except Corrupt:
        return Notice("aws", "spot interruption")  # the document exists only when the machine is reclaimed
