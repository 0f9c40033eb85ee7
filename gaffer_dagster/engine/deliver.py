"""Incidents are told to their receivers: claimed, sent, and only then noted as delivered.

Each of the three is a transaction, or a request, of its own. A message is claimed for a minute: a sender that dies
leaves it to the next one, under the same key.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from gaffer_dagster.domain.alert import is_receiver
from gaffer_dagster.domain.notice import write
from gaffer_dagster.engine.log import Log
from gaffer_dagster.engine.receivers import LOG, Receiver
from gaffer_dagster.errors import NotDeliveredError
from gaffer_dagster.store import db, deliveries

_FRESH = 20.0
"""Seconds after which a message that was claimed is not sent any more: the process stood still meanwhile, and by the
time that it is sent somebody else may be at it."""


@dataclass(frozen=True)
class Delivered:
    """`sent`: how many messages; `failed`: the receivers that did not take theirs; `left`: the notices that are not
    delivered yet, with those that wait for a mute to end."""

    sent: int
    failed: Sequence[str]
    left: int


def deliver(
    connection: db.Connection, receivers: Sequence[Receiver], log: Log, *, budget: timedelta = timedelta(seconds=20)
) -> Delivered:
    """Sends what is due, a message to each receiver in turn, until nothing is or the budget is over (the last message
    may outlast it). One that fails has its next turn in a later call."""
    ends = time.monotonic() + budget.total_seconds()
    failing = {each.name for each in deliveries.receivers(connection) if each.failing_since is not None}
    named = [each for each in receivers if is_receiver(each.name)]  # the others are told of as what they are
    turns = deque(sorted(named, key=lambda each: each.name in failing))  # who may hang must not keep others waiting
    sent = 0
    failed: list[str] = []
    while turns and time.monotonic() < ends:
        receiver = turns.popleft()
        taken = _send_next(connection, receiver, log)
        if taken:
            sent += 1
            turns.append(receiver)
        elif taken is not None:
            failed.append(receiver.name)
    names = {each.name for each in receivers}
    return Delivered(sent, failed, sum(each.waiting for each in deliveries.receivers(connection) if each.name in names))


def _send_next(connection: db.Connection, receiver: Receiver, log: Log) -> bool | None:
    """Whether the next message was taken. None: there is none."""
    asked = time.monotonic()
    key = deliveries.claim(connection, receiver.name, receiver.severity)
    notices = [] if key is None else deliveries.notices(connection, receiver.name, key)
    if key is None or not notices or time.monotonic() - asked > _FRESH:
        return None
    error = None
    try:
        receiver.send(write(key, notices))
    except NotDeliveredError as refusal:
        error = str(refusal)
    except Exception as unexpected:  # whose text may tell a secret
        error = type(unexpected).__name__
    deliveries.note(connection, receiver.name, key, error)
    if error is not None:
        log.warning("notice not delivered", receiver=receiver.name, key=str(key), notices=len(notices), error=error)
    elif receiver.name != LOG:
        log.info("notice delivered", receiver=receiver.name, key=str(key), notices=len(notices))
    return error is None
