"""Notices of AWS: spot interruptions and rebalance recommendations, asked for by IMDSv2."""

from __future__ import annotations

import time

from typing_extensions import override

from holdfast.documents import decode_object
from holdfast.errors import Corrupt
from holdfast.notice.cloud import Cloud
from holdfast.notice.metadata import Answer, Unreachable, ask
from holdfast.notice.word import Word, read_time

BASE = "http://169.254.169.254"
_TOKEN_S = 3600


class Aws(Cloud):
    """Asks for a spot interruption, then for a rebalance recommendation, which is advice: save, and go on.

    Source: EC2 user guide, "Spot Instance interruption notices"; aws-node-termination-handler.
    """

    name = "aws"
    pause_s = 5.0  # as the user guide says

    def __init__(self, base: str = BASE) -> None:
        self._base = base
        self._token: str | None = None
        self._token_until_s = 0.0
        self._has_advised = False

    @override
    def ask(self) -> Word | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            return _read_action(action)
        if self._has_advised:
            return None
        advice = self._get("/latest/meta-data/events/recommendations/rebalance")
        if advice is None:
            return None
        self._has_advised = True  # it stays there; one save for it is enough
        return Word("aws", "rebalance recommendation", is_final=False)

    def _get(self, path: str) -> str | None:
        """The document at a path; None if there is none (404)."""
        answer = self._authorized(path)
        if answer.status == 401:  # the token has expired, or another one was made for the machine
            self._token = None
            answer = self._authorized(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise Unreachable(f"{self._base}{path}: status {answer.status}")
        return answer.text

    def _authorized(self, path: str) -> Answer:
        if self._token is None or time.monotonic() > self._token_until_s:
            self._token = self._new_token()
        return ask(self._base, path, headers={"X-aws-ec2-metadata-token": self._token})

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S), "Content-Length": "0"}
        answer = ask(self._base, "/latest/api/token", method="PUT", headers=headers)
        if answer.status != 200:
            raise Unreachable(f"{self._base}/latest/api/token: status {answer.status}")
        self._token_until_s = time.monotonic() + _TOKEN_S * 0.9
        return answer.text.strip()


def _read_action(text: str) -> Word:
    try:
        told = decode_object(text, "the notice")
        until = told.text("time", max_chars=64) if "time" in told else ""
        return Word("aws", f"spot {told.text('action', max_chars=64)}", read_time(until))
    except Corrupt:
        return Word("aws", "spot interruption")  # that the document is there says enough
