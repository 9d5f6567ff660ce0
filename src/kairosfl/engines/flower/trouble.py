"""Nodes and servers that survive a SuperLink in trouble.

Under load the SuperLink answers some requests with an error of its own, status 500, such as a
database that is locked. Flower tries again after a connection that failed, but not after this: its
heartbeats end, so that a node is offline and a server loses its run, and a node whose request for
messages was answered so exits. Here they try again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from flwr.supercore import heartbeat
from flwr.supercore.retry import http_retry


def insistent(beat: Callable[[Any], None]) -> Callable[[Any], None]:
    """Flower's method that sends one heartbeat; after an error of the SuperLink it tries again."""

    def attempt(sender: Any) -> None:
        try:
            beat(sender)
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise
            raise heartbeat.HeartbeatFailure from error

    return attempt


def insist() -> None:
    """Let all heartbeats of this process try again, also those of a thread that runs already."""
    sender: Any = heartbeat.HeartbeatSender
    if not hasattr(sender, "insists"):
        sender._heartbeat, sender.insists = insistent(sender._heartbeat), True


def persist() -> None:
    """Let all requests of this process try again that Flower would try again after a 502."""
    codes: Any = http_retry
    codes._RETRYABLE_STATUS_CODES |= {httpx.codes.INTERNAL_SERVER_ERROR}
