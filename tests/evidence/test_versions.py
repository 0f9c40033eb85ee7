"""Tables of another version than the code: each command, each run and the sensor refuse, and say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import dagster as dg
import pytest
from click.testing import CliRunner, Result

import gaffer_dagster as gd
from gaffer_dagster.cli import main
from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.errors import GafferError, SchemaAheadError, SchemaBehindError
from gaffer_dagster.store import migrate
from gaffer_dagster.testing import Databases, prepare
from tests.support import jobs, protocol

NEWEST = migrate.migrations()[-1].number
BEHIND, AHEAD, EDITED, OTHERS = (
    "gaffer migrate",
    "upgrade gaffer_dagster",
    "put its file back",
    "is not that of gaffer_dagster",
)
STATES = {
    "no schema": ("drop schema gaffer cascade", BEHIND),
    "an empty schema": ("drop schema gaffer cascade; create schema gaffer", BEHIND),
    "tables that say nothing of migrations": ("delete from gaffer.migration", BEHIND),
    "a migration less": (f"delete from gaffer.migration where number = {NEWEST}", BEHIND),
    "half migrated by hand": ("delete from gaffer.migration where number = 5", BEHIND),
    "a migration more": ("insert into gaffer.migration values (999, 'later', 'x', now())", AHEAD),
    "another text of one": ("update gaffer.migration set checksum = 'x' where number = 4", EDITED),
    "somebody else's migrations": (
        "drop schema gaffer cascade; create schema gaffer; create table gaffer.migration (version text)",
        OTHERS,
    ),
}
COMMANDS = {
    "status": 1, "runs": 1, "ticks copy_rows": 1, "check": 2, "check --notify": 2, "doctor": 1, "alerts list": 1,
    "audit": 1, "metrics": 1, "pause copy_rows": 1, "resume copy_rows": 1, "release copy_rows": 1,
    "watermark show copy_rows": 1, "items list copy_rows": 1, "rename copy_rows other --yes": 1, "retire copy_rows": 1,
    "protect target": 1, "unprotect target --yes": 1, "prune --yes": 1,
}  # fmt: skip


def gaffer(url: str, *words: str) -> Result:
    return CliRunner().invoke(main, list(words), env={"GAFFER_DATABASE_URL": url})


@pytest.fixture(scope="module", params=STATES)
def state(request: pytest.FixtureRequest, gaffer_databases: Databases) -> Iterator[tuple[str, str, str]]:
    text, cure = STATES[request.param]
    with gaffer_databases.scratch() as url:
        jobs.make_source(url, 5)
        jobs.run(jobs.spec(), url)
        jobs.execute(url, text)
        yield request.param, url, cure


def test_everybody_refuses_and_says_what_to_do(state: tuple[str, str, str]) -> None:
    name, url, cure = state
    with pytest.raises(GafferError, match=cure):
        jobs.run(jobs.spec(), url)
    for words, code in COMMANDS.items():
        done = gaffer(url, *words.split())
        said = re.sub(r"\s+", " ", done.output).replace("pip install --upgrade gaffer_dagster", AHEAD)
        assert (done.exit_code, cure in said, "Traceback" in said) == (code, True, False), (name, words, done.output)
    asset = gd.gaffer_asset(name="copy_rows", due=jobs.spec().due, sql="select from due")
    defs = gd.build_definitions(asset, resource=gd.GafferResource(dsn=url))
    with dg.DagsterInstance.ephemeral() as instance:
        with pytest.raises(GafferError, match=cure):
            defs.resolve_sensor_def("gaffer_watch")(dg.build_sensor_context(instance, definitions=defs))
        run = defs.resolve_job_def("copy_rows_job").execute_in_process(instance=instance, raise_on_error=False)
        (failure,) = run.get_step_failure_events()
        assert cure in str(failure.step_failure_data.error)
    assert jobs.query(url, "select count(*) from target") == [(5,)]


def test_migrate_mends_what_it_can_and_refuses_the_rest(state: tuple[str, str, str]) -> None:
    """What it may not touch is as it was."""
    name, url, cure = state
    done = gaffer(url, "migrate", "--yes")
    if name in ("no schema", "an empty schema"):
        assert done.exit_code == 0, done.output
        prepare(url, "source", "id")  # whose trigger went with the schema
        assert jobs.run(jobs.spec(), url).outcome is Outcome.SUCCEEDED
        return
    # Whether tables that are there and not noted were made by these migrations, only their owner can tell.
    said = "is there already, and gaffer.migration does not say so" if cure == BEHIND else cure
    assert (done.exit_code, said in done.output) == (1, True), done.output
    assert "Traceback" not in done.output


def test_a_run_at_work_is_not_hurt_by_a_migration_and_the_next_one_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration that changes what the run is about to write, by another process, between two of its statements."""
    jobs.make_source(url, 30)
    later = replace(
        migrate.migrations()[0],
        number=NEWEST + 1,
        name="later",
        checksum="x",
        text="alter table gaffer.job_runs add column later integer not null default 0;"
        " alter table gaffer.job_lease add column later integer; alter table gaffer.job add column later text;",
    )

    def work(batch: Batch) -> None:
        jobs.copy_rows(batch)
        if batch.number == 2:
            with monkeypatch.context() as patched, protocol.session(url) as connection:
                known = [*migrate.migrations(), later]
                patched.setattr(migrate, "migrations", lambda: known)
                assert [each.number for each in migrate.migrate(connection)] == [NEWEST + 1]

    record = jobs.run(jobs.spec(batch_rows=10), url, work)
    assert (record.outcome, record.batches) == (Outcome.SUCCEEDED, 3)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(30, 30)]
    with pytest.raises(SchemaAheadError, match=AHEAD):
        jobs.run(jobs.spec(), url)


def test_a_batch_waits_for_a_migration_that_is_just_going_on(url: str) -> None:
    """It has locked every table; the batch commits once it is over."""
    jobs.make_source(url, 10)
    with jobs.connect(url) as migration:

        def goes_on() -> None:
            protocol.until(lambda: protocol.waits_for_a_lock(url))
            migration.commit()

        def work(batch: Batch) -> None:
            jobs.copy_rows(batch)
            migration.autocommit = False
            migration.execute("lock table gaffer.job_runs, gaffer.job_lease, gaffer.job in access exclusive mode")
            protocol.Actor(goes_on)

        record = jobs.run(jobs.spec(), url, work)
    assert (record.outcome, record.batches) == (Outcome.SUCCEEDED, 1)
    assert jobs.query(url, "select count(*), count(distinct id) from target") == [(10, 10)]


def test_code_that_does_not_look_at_the_version_is_seen_to_work_on_tables_of_another(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.make_source(url, 5)
    jobs.execute(url, "delete from gaffer.migration where number = 5")
    with pytest.raises(SchemaBehindError):
        jobs.run(jobs.spec(), url)
    known = migrate.migrations()
    monkeypatch.setattr(migrate, "migrations", lambda: [each for each in known if each.number != 5])
    assert jobs.run(jobs.spec(), url).items == 5
