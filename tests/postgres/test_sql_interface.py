"""Work outside Python under the same lease: the examples of docs/sql.md, run by the real psql and the real dbt."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from gaffer_dagster.store import db, protect, tables
from gaffer_dagster.store.operations import Operator
from tests.support import jobs, protocol, tools, variants

ROOT = Path(__file__).parents[2]
FENCED = ROOT / "examples" / "psql" / "fenced.sh"
TABLES = """
    create table orders (id int primary key, ordered_on date not null);
    create table totals (day date primary key, orders bigint not null);
    insert into orders select n, current_date - mod(n, 2) from generate_series(1, 10) n
"""


@pytest.fixture
def shop(url: str) -> str:
    """`totals` is protected, for the batches of any job."""
    jobs.execute(url, TABLES)
    with protocol.session(url) as connection:
        protect.protect(connection, tables.find(connection, "totals"), [], Operator("ann", None))
    return url


class Script:
    """`fenced.sh` with a file of its own, as a process."""

    def __init__(self, url: str, folder: Path, text: str, job: str = "nightly") -> None:
        file = folder / f"{uuid4()}.sql"
        file.write_text(text)
        path = os.pathsep.join([str(Path(tools.of_postgres("psql")).parent), os.environ["PATH"]])
        self.process = subprocess.Popen(
            [str(FENCED), job, str(file)],
            env={**os.environ, "PATH": path, "GAFFER_DATABASE_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        print(out, err)
        return self.process.returncode, out.strip(), err


def totals(url: str) -> list[int]:
    return [row[0] for row in jobs.query(url, "select orders from totals order by day")]


def runs(url: str, job: str = "nightly") -> list[tuple[str, int]]:
    return jobs.query(url, "select outcome, batches from gaffer.job_runs where job = %s order by id", job)  # type: ignore[return-value]


SLOW = "insert into totals values ('2001-01-01', 7); select from pg_sleep(1.5);"


def asleep(url: str) -> bool:
    return bool(jobs.query(url, "select from pg_stat_activity where wait_event = 'PgSleep'"))


def test_a_file_of_sql_runs_as_a_batch(shop: str, tmp_path: Path) -> None:
    work = (ROOT / "examples" / "psql" / "totals.sql").read_text()
    for _ in range(2):
        code, said, complained = Script(shop, tmp_path, work).ends()
        assert (code, said) == (0, "succeeded"), complained
    assert totals(shop) == [5]
    assert runs(shop) == [("succeeded", 1)] * 2
    ((lease, failures),) = jobs.query(
        shop, "select lease_id, consecutive_failures from gaffer.job_lease join gaffer.job on name = job"
    )
    assert (lease, failures) == (None, 0)


def test_a_second_one_at_the_same_time_is_busy(shop: str, tmp_path: Path) -> None:
    first = Script(shop, tmp_path, SLOW)
    protocol.until(lambda: asleep(shop))
    assert Script(shop, tmp_path, "insert into totals values ('2001-01-02', 8);").ends()[:2] == (0, "busy")
    assert first.ends()[:2] == (0, "succeeded")
    assert totals(shop) == [7]
    assert sorted(runs(shop)) == [("busy", 0), ("succeeded", 1)]


def test_a_fence_that_was_taken_over_makes_the_commit_fail(shop: str, tmp_path: Path) -> None:
    first = Script(shop, tmp_path, SLOW)
    protocol.until(lambda: asleep(shop))
    protocol.expire(shop, "nightly")
    assert Script(shop, tmp_path, "insert into totals values ('2001-01-02', 8);").ends()[:2] == (0, "succeeded")
    code, said, complained = first.ends()
    assert (code, said) == (3, "")
    assert 'fence 1 of job "nightly" is no longer current' in complained
    assert totals(shop) == [8]
    assert runs(shop) == [("abandoned", 0), ("succeeded", 1)]


@pytest.mark.parametrize(
    ("work", "complains"),
    [
        ("select 1 / 0;", "division by zero"),
        ("insert into totals values ('2001-01-01', 7); commit;", "without gaffer.commit_batch"),
        ("commit; insert into totals values ('2001-01-01', 7);", "no batch is open"),
        ("\\set ON_ERROR_STOP off\ninsert into totals values ('2001-01-01', 7); select 1 / 0;", "division by zero"),
    ],
)
def test_what_fails_is_recorded_and_the_lease_is_free(shop: str, tmp_path: Path, work: str, complains: str) -> None:
    code, _, complained = Script(shop, tmp_path, work).ends()
    assert code == 3
    assert complains in complained
    assert totals(shop) == []
    assert runs(shop) == [("failed", 0)]
    assert Script(shop, tmp_path, "select 1;").ends()[:2] == (0, "1\nsucceeded")


def test_a_wake_up_that_met_this_run_is_not_forgotten(shop: str, tmp_path: Path) -> None:
    first = Script(shop, tmp_path, SLOW)
    protocol.until(lambda: asleep(shop))
    with protocol.session(shop) as connection:
        row = connection.execute(
            "select outcome, holder from gaffer.acquire('nightly', 0, gen_random_uuid(), p_wait => '0')"
        ).fetchone()
        assert row is not None
        assert (row[0], row[1].split(":")[0]) == ("busy", connection.info.user)
    assert first.ends()[:2] == (0, "capped")
    assert jobs.query(shop, "select follow_up_at is not null from gaffer.job") == [(True,)]
    assert Script(shop, tmp_path, "select 1;").ends()[:2] == (0, "1\nsucceeded")


RUN = "'nightly', 0, :fence, ':lease', :run"
BATCH = "gaffer.begin_batch(':lease')"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("gaffer.acquire('nightly', 1, gen_random_uuid())", 'job "nightly" has no slot 1: its slots are 0 to 0'),
        ("gaffer.acquire('nightly', -1, gen_random_uuid())", "has no slot -1"),
        ("gaffer.acquire('nightly', 0, null)", "takes a lease_id"),
        ("gaffer.acquire('nightly', 0, gen_random_uuid(), p_timeout => '-1 s')", "a timeout of more than zero"),
        ("gaffer.acquire('nightly', 0, gen_random_uuid(), p_ttl => '11 minutes')", "cannot last 00:11:00"),
        (f"gaffer.renew({RUN[:-6]}, '11 minutes')", "between 1 second and 10 minutes is allowed"),
        (f"gaffer.renew({RUN[:-6]}, '0')", "cannot last 00:00:00"),
        (f"gaffer.renew({RUN[:-6]}, null)", "cannot last <NULL>"),
        (f"gaffer.supersede({RUN}, gen_random_uuid(), '11 minutes')", "cannot last 00:11:00"),
        (f"{BATCH}, gaffer.commit_batch({RUN}, ':lease', p_ttl => '3 days')", "cannot last 3 days"),
        (f"{BATCH}, gaffer.commit_batch({RUN}, ':lease', p_items => -5)", "cannot have -5 items"),
        ("gaffer.begin_batch(null)", "a batch takes a uuid and a timeout between"),
        ("gaffer.begin_batch(gen_random_uuid(), '0')", "between 1 millisecond and 1 day"),
        ("gaffer.begin_batch(gen_random_uuid(), '100 days')", "not .* and 100 days"),
        (f"gaffer.end_run({RUN}, 'busy')", "cannot end as busy"),
        ("gaffer.advisory_key(null)", "needs the name of a job"),
        ("gaffer.protect('gaffer.job')", "gaffer.job cannot be protected"),
        ("gaffer.protect('short_lived')", "short_lived cannot be protected"),
        ("gaffer.protect(null)", "table null cannot be protected"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused(url: str, call: str, said: str) -> None:
    """A lease that was too long would be taken for one of a clock that ran ahead, and one of no length be lost."""
    lease = uuid4()
    with jobs.connect(url) as connection:
        connection.execute("select gaffer.register_external('nightly')")
        connection.execute("create temporary table short_lived (id int)")
        row = connection.execute("select fence, run_id from gaffer.acquire('nightly', 0, %s)", [lease]).fetchone()
        assert row is not None
        known = {":fence": row[0], ":run": row[1], ":lease": lease}
        for name, value in known.items():
            call = call.replace(name, str(value))
        with pytest.raises(psycopg.Error, match=said):
            connection.execute(f"select {call}")
        connection.rollback()
    assert jobs.query(url, "select lease_id, lease_until > gaffer.clock() from gaffer.job_lease") == [(lease, True)]
    assert runs(url) == [("running", 0)]


def test_a_lease_id_serves_for_one_run(url: str) -> None:
    jobs.execute(url, "select gaffer.register_external('nightly')")
    lease = uuid4()
    take = "select outcome, fence, run_id from gaffer.acquire('nightly', 0, %s)"
    [(_, fence, run)] = jobs.query(url, take, lease)
    assert jobs.query(url, take, lease) == [("granted", fence, run)]
    jobs.query(url, "select gaffer.end_run('nightly', 0, %s, %s, %s)", fence, lease, run)
    said = f'was that of run {run} of slot 0 of job "nightly", which is succeeded; make one'
    with pytest.raises(psycopg.Error, match=said):
        jobs.query(url, take, lease)
    assert jobs.query(url, "select outcome from gaffer.acquire('nightly', 0, gen_random_uuid())") == [("granted",)]


def two_slots(url: str) -> tuple[Any, int, int]:
    """A run in slot 0 of two: its lease, fence and number. There is another job."""
    lease = uuid4()
    jobs.execute(url, "select gaffer.register_external('nightly'), gaffer.register_external('other')")
    jobs.execute(
        url, "update gaffer.job set slots = 2; insert into gaffer.job_lease (job, slot) select name, 1 from gaffer.job"
    )
    ((fence, run),) = jobs.query(url, "select fence, run_id from gaffer.acquire('nightly', 0, %s)", lease)
    return lease, fence, run


STATE = """
    select l.job, l.slot, l.fence, l.lease_id, r.outcome, j.leases_lost, j.consecutive_failures
      from gaffer.job j join gaffer.job_lease l on l.job = j.name left join gaffer.job_runs r using (lease_id)
     order by 1, 2
"""


@pytest.mark.parametrize(
    ("job", "slot", "more"),
    [
        ("nightly", 1, 0), ("other", 0, 0), ("nobody", 0, 0), ("nightly", 0, 1), ("nightly", 0, -1),
        ("nightly", None, 0), (None, 0, 0),
    ],
)  # fmt: skip
def test_a_run_that_has_its_lease_is_not_ended_by_who_mixes_up_its_slot_or_job(
    url: str, job: str | None, slot: int | None, more: int
) -> None:
    lease, fence, run = two_slots(url)
    before = jobs.query(url, STATE)
    wrong = [job, slot, fence + more, lease]
    batch = uuid4()
    refused = [
        ("select gaffer.end_run(%s, %s, %s, %s, %s, 'succeeded')", [*wrong, run], "nothing was changed"),
        ("select gaffer.supersede(%s, %s, %s, %s, %s, gen_random_uuid())", [*wrong, run], "no longer current|null"),
        ("select gaffer.charge_item(%s, %s, %s, %s, 'key', '1 min')", wrong, "no longer current|null"),
        ("select gaffer.commit_batch(%s, %s, %s, %s, %s, %s)", [*wrong, run, batch], "no longer current|null"),
    ]
    for text, values, said in refused:
        with jobs.connect(url) as connection, connection.transaction(force_rollback=False):
            connection.execute("select gaffer.begin_batch(%s)", [batch])
            with pytest.raises(psycopg.Error, match=said), connection.transaction():
                connection.execute(text.encode(), values)
    assert jobs.query(url, "select gaffer.renew(%s, %s, %s, %s)", *wrong) == [(False,)]
    assert jobs.query(url, STATE) == before
    assert jobs.query(url, "select result from gaffer.end_run('nightly', 0, %s, %s, %s)", fence, lease, run) == [
        ("ended",)
    ]


def test_who_ends_any_run_by_its_lease_alone_is_found(url: str) -> None:
    broken = {
        "if p_slot is distinct from v_run.slot": "if false and p_slot is distinct from v_run.slot",
        "or (v_lease.job is not null and (not": "or (false and (not",
    }
    variants.replace(url, "end_run", broken)
    with pytest.raises(pytest.fail.Exception):
        test_a_run_that_has_its_lease_is_not_ended_by_who_mixes_up_its_slot_or_job(url, "nightly", 1, 0)


def test_a_run_that_lost_its_lease_is_ended_as_what_it_was(url: str) -> None:
    lease, fence, run = two_slots(url)
    jobs.query(url, "select gaffer.release('nightly', 0, 'ann', null)")
    end = "select result from gaffer.end_run('nightly', %s, %s, %s, %s)"
    with pytest.raises(psycopg.Error, match=f'run {run} is of slot 0 of job "nightly", not of slot 1'):
        jobs.query(url, end, 1, fence, lease, run)
    assert jobs.query(url, end, 0, fence, lease, run) == [("lost_lease",)]


def test_a_lease_is_of_one_slot(url: str) -> None:
    lease, _, run = two_slots(url)
    before = jobs.query(url, STATE)
    for job, slot in (("nightly", 1), ("other", 0)):
        with pytest.raises(psycopg.Error, match=f'was that of run {run} of slot 0 of job "nightly", which is running'):
            jobs.query(url, "select gaffer.acquire(%s, %s, %s)", job, slot, lease)
    assert jobs.query(url, STATE) == before


def test_the_document_names_every_refusal_and_only_functions_that_exist(url: str) -> None:
    text = (ROOT / "docs" / "sql.md").read_text()
    head = (ROOT / "gaffer_dagster/store/migrations/0002_protocol.sql").read_text()
    assert set(re.findall(r"GF\d+", text)) == set(re.findall(r"GF\d+", head))
    for name in set(re.findall(r"gaffer\.(\w+)\(", text)):
        assert jobs.query(url, "select from pg_proc where pronamespace = 'gaffer'::regnamespace and proname = %s", name)


# ── dbt ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

DBT = os.environ.get("GAFFER_DBT") or shutil.which("dbt")


def dbt(url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    assert DBT is not None
    parts = db.parse_url(url)
    project = folder / "dbt"
    if not project.exists():
        shutil.copytree(ROOT / "examples" / "dbt", project)
    names = {"PGHOST": "host", "PGPORT": "port", "PGUSER": "user", "PGPASSWORD": "password", "PGDATABASE": "dbname"}
    return subprocess.run(
        [DBT, "--no-use-colors", "--no-send-anonymous-usage-stats", "run", "--profiles-dir", "."],
        cwd=project,
        env={**os.environ, **{name: str(parts[part]) for name, part in names.items() if part in parts}},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(DBT is None, reason="there is no dbt: name it in GAFFER_DBT, or put it on the PATH")
def test_dbt_commits_its_models_under_the_lease(shop: str, tmp_path: Path) -> None:
    done = dbt(shop, tmp_path)
    assert done.returncode == 0, done.stdout
    assert totals(shop) == [5, 5]
    assert runs(shop, "dbt_nightly") == [("succeeded", 1)]

    # A second one meanwhile.
    with protocol.session(shop) as connection:
        connection.execute("select gaffer.acquire('dbt_nightly', 0, gen_random_uuid())")
    done = dbt(shop, tmp_path)
    assert done.returncode != 0
    assert "gaffer job dbt_nightly is busy" in done.stdout

    # Taken over while a model is at work: its transaction does not commit, and dbt fails.
    protocol.expire(shop, "dbt_nightly")
    jobs.execute(shop, "insert into orders values (11, current_date)")
    (tmp_path / "dbt" / "models" / "totals.sql").write_text(
        "{{ config(unique_key='day') }} select ordered_on as day, count(*) as orders from orders,"
        " (select pg_sleep(2)) as slow group by 1"
    )
    actor = protocol.Actor(lambda: dbt(shop, tmp_path))
    protocol.until(lambda: asleep(shop))
    protocol.expire(shop, "dbt_nightly")
    with protocol.session(shop) as connection:
        connection.execute("select gaffer.acquire('dbt_nightly', 0, gen_random_uuid())")
    done = actor.result()
    assert done.returncode != 0
    assert 'of job "dbt_nightly" is no longer current' in done.stdout
    assert totals(shop) == [5, 5]
