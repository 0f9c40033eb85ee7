"""The demo's main job on its real input: the same answer whatever the batch size, however often it is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from decimal import Decimal

import pytest
from rich.console import Console

import demo
from gaffer_dagster.store import db, prepare
from tests.support import jobs, warm
from tests.support.faults import backends, wait_until

pytestmark = pytest.mark.timeout(300)

SEED = int(os.environ.get("GAFFER_CHAOS_SEED", "20130310"))
KILLS = int(os.environ.get("GAFFER_CHAOS_KILLS", "6"))

MODULE = """
import os
import definitions
import gaffer_dagster as gd
from gaffer_dagster.adapter.assets import job_of

work = job_of(definitions.carrier_delay).work
carrier_delay = gd.gaffer_asset(
    name="carrier_delay", due=gd.NewRows("flights", key="id"),
    bounds=gd.Bounds(batch_rows=int(os.environ["BATCH_ROWS"]), batches=10_000),
)(work)
"""


@pytest.fixture
def flights(url: str) -> str:
    demo.load(url, Console(quiet=True))
    with db.connect(url, application_name="test") as connection:
        prepare.apply(connection, prepare.statements(connection, "flights", "id", changed=False))
    return url


def test_a_year_of_flights_is_added_up_once_under_kills(flights: str, tmp_path: os.PathLike[str]) -> None:
    print(f"seed {SEED}, {KILLS} kills")
    chance = random.Random(SEED)
    module = os.path.join(tmp_path, "flights_job.py")
    with open(module, "w") as file:
        file.write(MODULE)
    environment = {**os.environ, "GAFFER_DATABASE_URL": flights, "PYTHONPATH": str(demo.HERE)}
    command = warm.command("run", "carrier_delay", "-f", module, "-q")

    def start() -> subprocess.Popen[bytes]:
        environment["BATCH_ROWS"] = str(chance.choice([97, 1_000, 3_333, 10_000]))
        return subprocess.Popen(command, env=environment, cwd=demo.HERE)

    for _ in range(KILLS):
        process = start()
        done = done_so_far(flights)
        deadline = time.monotonic() + 60
        while done_so_far(flights) == done and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        # A COMMIT that was under way may still extend the lease, until the server is done with the dead client.
        wait_until(lambda: not backends(flights, "carrier_delay"), "the server is done with the killed process")
        jobs.execute(flights, "update gaffer.job_lease set lease_until = 'epoch'")  # a minute goes by
    assert start().wait(200) == 0

    assert jobs.query(flights, "select sum(flights), sum(cancelled) from carrier_delay") == [(demo.FLIGHTS, 8_255)]
    found = jobs.query(
        flights,
        "select carrier, sum(flights), round(sum(delay_minutes)::numeric / sum(flights - cancelled), 4)"
        " from carrier_delay group by carrier",
    )
    told = {carrier: (count, delay) for carrier, count, delay in found}
    assert (told["UA"], told["9E"][1], told["HA"][1]) == (
        (58_665, Decimal("12.1061")),
        Decimal("16.7258"),
        Decimal("4.9006"),
    )
    assert (told["B6"][0], told["EV"][0], told["OO"][0]) == (54_635, 54_173, 32)
    assert (
        jobs.query(
            flights,
            """
        select day, carrier, flights, cancelled, mean_dep_delay from carrier_delay
        except all
        select day, carrier, count(*), count(*) filter (where dep_time is null), avg(dep_delay)
          from flights group by day, carrier
        """,
        )
        == []
    ), "the days and carriers as SQL adds them up"
    outcomes = dict(jobs.query(flights, "select outcome, count(*) from gaffer.job_runs group by 1"))
    assert outcomes["succeeded"] == 1
    assert set(outcomes) <= {"succeeded", "abandoned"}
    assert jobs.query(flights, "select sum(items) from gaffer.job_runs") == [(demo.FLIGHTS,)]


def done_so_far(url: str) -> object:
    found = jobs.query(url, "select position from gaffer.job_watermark")
    return found[0][0] if found else None
