"""Signs of life to something outside, which hears when they stop (as Healthchecks does): of the watch, and of each job.

A sign is a GET of a URL, which a variable of the environment has. That it fails is logged, and never an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

from gaffer_dagster.domain.alert import is_variable
from gaffer_dagster.engine import web
from gaffer_dagster.engine.log import Log
from gaffer_dagster.errors import BadInputError, NotDeliveredError
from gaffer_dagster.store import db, deliveries

_LIMIT = timedelta(seconds=5)


def beat(variable: str, environment: Mapping[str, str], log: Log) -> bool:
    """Asks for the variable's URL (with `…_PRIVATE=1` also at a private address, and in clear). False: it was not
    taken, or there is none."""
    if not environment.get(variable):
        return False
    try:
        web.ask(web.target(variable, environment), "GET", limit=_LIMIT)
    except (BadInputError, NotDeliveredError) as error:
        log.warning("heartbeat not taken", variable=variable, error=str(error))
        return False
    return True


def beat_for_jobs(
    connection: db.Connection, environment: Mapping[str, str], log: Log, *, budget: timedelta = timedelta(seconds=10)
) -> int:
    """A sign for each job that has succeeded since its last one, at least once, where this environment has its URL
    (`Alerts(heartbeat=…)`). How many were taken; the others have their turn in a later pass."""
    ends = time.monotonic() + budget.total_seconds()
    taken = 0
    for job, variable, success in deliveries.unpinged(connection, [name for name in environment if is_variable(name)]):
        if time.monotonic() >= ends:
            break
        if beat(variable, environment, log.bind(job=job)):
            deliveries.note_ping(connection, job, success)
            taken += 1
    return taken
