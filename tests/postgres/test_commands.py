"""Every command there is holds the same rules: what only shows something has --json and changes nothing; what changes
something says who and why, is kept in `gaffer.operator_action`, and asks first where no other command takes it back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from gaffer_dagster.cli import Commands, main
from gaffer_dagster.cli.audit import in_plain_words
from gaffer_dagster.cli.command import Change, Read, Risky
from gaffer_dagster.store import db, operations
from gaffer_dagster.store.operations import Operator
from tests.support import jobs

WHO = ("--by", "ann", "--reason", "a test wants it")
NOTED = {"--yes", "--by", "--reason"}
# Neither shows nor changes what the database has; with the options that they have all the same.
APART: Mapping[str, set[str]] = {
    "run": {"--json"},  # its runs are in gaffer.job_runs
    "watch": {"--json"},  # its passes are in gaffer.watch
    "completion": set(),  # a script for a shell
    "db psql": set(),  # whatever is typed there
    "db stop": {"--yes"},  # the server of a developer: what is kept there goes with it
    "db reset": {"--yes"},
}
READS: Mapping[str, Sequence[str]] = {
    "status": [],
    "runs": ["copied"],
    "ticks": ["copied"],
    "check": [],
    "alerts list": ["--all"],
    "audit": [],
    "metrics": [],
    "preview": ["copied"],
    "simulate": ["0 6 * * *"],
    "items list": ["items", "--all"],
    "watermark show": ["copied"],
}
# They need more than a database of a test; they hold the rules, and are run where that is.
ELSEWHERE = {"db url", "doctor", "dagster check", "dagster sync"}
# In this order, with whose action it is and what is done.
CHANGES: Mapping[str, tuple[Sequence[str], str | None, str]] = {
    "pause": (["copied", "--until", "2h"], "copied", "paused until 20"),
    "resume": (["copied"], "copied", "resumed"),
    "alerts mute": (["copied", "--until", "1h"], "copied", "muted until 20"),
    "alerts unmute": (["copied"], "copied", "not muted any more"),
    "alerts ack": (["1"], "copied", "knows of incident 1 (failures)"),
    "alerts test": (["log"], None, "sent a test message to log"),
    "release": (["copied"], "copied", "lease of slot 0 taken from "),
    "watermark set": (["copied", "beginning"], "copied", "watermark moved: it was just after row 5 "),
    "watermark adopt": (["copied"], "copied", "adopted after a restore, fences 1,000,000 ahead"),
    "items retry": (["items", "a"], "items", "1 row to be tried again: a"),
    "items drop": (["items", "b"], "items", "1 row dropped: b"),
    "protect": (["target"], None, "table public.target protected"),
    "unprotect": (["target"], None, "table public.target not protected any more"),
    "prepare": (["plain", "--key", "id", "--apply"], None, "table public.plain prepared"),
    "prune": (["--older-than", "1d"], None, "pruned 3 runs and 1 incident of before "),
    "rename": (["copied", "other"], "other", "renamed; it was copied"),
    "retire": (["other"], "other", "retired"),
    "register": (["-f", "FILE"], "defined", "registered"),
    "migrate": ([], None, "tables migrated to "),
}


def leaves(group: click.Group = main, before: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def breaches(group: click.Group = main) -> list[str]:
    found: list[str] = []
    for name, command in leaves(group):
        options = {option for each in command.params for option in each.opts}
        wanted = APART.get(name, NOTED if "--yes" in options else {"--json"})
        if not wanted <= options or not (command.help or "").strip():
            found.append(name)
        if name not in {*APART, *READS, *CHANGES, *ELSEWHERE}:
            found.append(f"{name} is run by no test here")
    return found


def gaffer(url: str, *words: str, group: click.Group = main) -> Result:
    return CliRunner().invoke(group, list(words), env={"GAFFER_DATABASE_URL": url})


@pytest.fixture
def lived_in(url: str) -> str:
    """A database in which each change has something to change."""
    jobs.make_source(url, 5)
    jobs.run(jobs.spec("copied"), url)
    jobs.execute(url, "create table plain (id int primary key)")
    jobs.execute(url, "select gaffer.register_external('items')")
    jobs.execute(url, "update gaffer.job set spec = jsonb_set(spec, '{due}', '{\"kind\": \"x\"}') where name = 'items'")
    jobs.execute(
        url,
        "insert into gaffer.job_item (job, key, attempts, next_attempt_at, first_failed_at, failed_at, parked_at)"
        " select 'items', key, 3, now(), now(), now(), now() from unnest(array['a', 'b']) key",
    )
    jobs.execute(
        url,
        "insert into gaffer.alert (job, kind, severity, since_at, opened_at, details) values"
        " ('copied', 'failures', 'error', now(), now(), '{}')",
    )
    jobs.execute(
        url,
        "insert into gaffer.alert (job, kind, severity, since_at, opened_at, resolved_at, details)"
        " select 'copied', 'absence', 'error', t, t, t, '{}' from (select now() - interval '9 days') at (t)",
    )
    jobs.execute(
        url,
        "insert into gaffer.job_runs (job, slot, owner, trigger, spec_hash, started_at, ended_at, outcome)"
        " select 'items', 0, 'x', 'command', 'x', now() - interval '9 days', now() - interval '9 days', 'busy'"
        " from generate_series(1, 103)",
    )
    return url


def kept(url: str) -> list[Any]:
    """Everything in our tables, but for what any connection moves."""
    tables = [name for (name,) in jobs.query(url, "select tablename from pg_tables where schemaname = 'gaffer'")]
    text = sql.SQL("select array_agg(t::text order by t::text) from gaffer.{} t")
    with jobs.connect(url) as connection:
        return [(name, connection.execute(text.format(sql.Identifier(name))).fetchone()) for name in sorted(tables)]


def actions(url: str) -> list[operations.Action]:
    with db.connect(url, application_name="test") as connection:
        return operations.actions(connection, None, 1_000)


def test_every_command_holds_the_rules() -> None:
    assert breaches() == []


def test_every_command_says_in_the_list_what_it_does() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(f"\n  {name} " in shown for name in main.list_commands(click.Context(main)))


@pytest.mark.parametrize("options", [[], ["--yes"], ["--yes", "--by"]])
def test_a_command_that_breaks_them_is_found(options: list[str]) -> None:
    broken = Commands("gaffer")
    made = click.Command("wipe", params=[click.Option([each]) for each in options], help="Wipe.")
    broken.add_command(made)
    assert breaches(broken) == ["wipe", "wipe is run by no test here"]


# ── what reads ───────────────────────────────────────────────────────────────────────────────────────────────────────


def read(url: str, name: str, group: click.Group = main) -> Result:
    return gaffer(url, *name.split(), *READS.get(name, ()), "--json", group=group)


def test_every_read_tells_json_alone_and_works_where_nothing_can_be_written(lived_in: str) -> None:
    name = db.parse_url(lived_in)["dbname"]
    jobs.execute(lived_in, f"alter database {name} set timezone = 'Asia/Tokyo'")
    jobs.execute(lived_in, f"alter database {name} set default_transaction_read_only = on")
    for command in READS:
        done = read(lived_in, command)
        assert (done.exit_code in (0, 1), done.stderr) == (True, ""), (command, done.output)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines or command == "audit", command
        assert all(isinstance(line, dict) for line in lines), command
        assert "+09:00" not in done.stdout, command  # times are in UTC
    assert gaffer(lived_in, "status").exit_code == gaffer(lived_in, "runs").exit_code == 0


def test_a_read_that_writes_is_found(lived_in: str) -> None:
    def note(as_json: bool) -> None:
        with db.connect(lived_in, application_name="test") as connection:
            operations.note(connection, None, "prepare", Operator("ann", None), {})

    broken = Commands("gaffer")
    broken.add_command(Read("peek", callback=note))
    jobs.execute(lived_in, f"alter database {db.parse_url(lived_in)['dbname']} set default_transaction_read_only = on")
    done = read(lived_in, "peek", broken)
    assert (done.exit_code, "read-only" in done.stderr) == (1, True), done.output


def test_times_are_shown_in_utc_whatever_the_role_prefers(lived_in: str) -> None:
    shown = gaffer(lived_in, "runs", "copied").stdout
    jobs.execute(lived_in, f"alter database {db.parse_url(lived_in)['dbname']} set timezone = 'Asia/Tokyo'")
    assert gaffer(lived_in, "runs", "copied").stdout == shown
    assert "Z" in shown


# ── what changes something ───────────────────────────────────────────────────────────────────────────────────────────


def change(url: str, name: str, folder: Path, *more: str, group: click.Group = main) -> Result:
    words = [str(folder / "defined.py") if word == "FILE" else word for word in CHANGES[name][0]]
    return gaffer(url, *name.split(), *words, *more, group=group)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "defined.py").write_text(
        "import gaffer_dagster as gd\n"
        "@gd.gaffer_asset(due=gd.NewRows('source', 'id'), schedule=gd.Schedule('0 6 * * *'))\n"
        "def defined(batch): ...\n"
    )
    return tmp_path


def hold(url: str) -> None:
    jobs.execute(url, "select gaffer.acquire('copied', 0, gen_random_uuid())")


def noted(url: str, before: int) -> list[tuple[str, str | None, str | None, str]]:
    return [
        (each.by, each.reason, each.job, in_plain_words(each)) for each in actions(url)[: len(actions(url)) - before]
    ]


def test_every_change_is_kept_with_who_when_why_and_what(lived_in: str, empty_url: str, folder: Path) -> None:
    for name, (_, job, words) in CHANGES.items():
        url = empty_url if name == "migrate" else lived_in
        if name == "release":
            hold(url)
        if name == "prune":
            jobs.execute(url, "update gaffer.alert set resolved_at = now() where resolved_at is null")
        before = 0 if name == "migrate" else len(actions(url))
        done = change(url, name, folder, "--yes", *WHO)
        assert done.exit_code == 0, (name, done.output)
        (told,) = noted(url, before)
        assert told[:3] == ("ann", "a test wants it", job), name
        assert told[3].startswith(words), name
    shown = gaffer(lived_in, "audit").stdout
    assert all(words.strip() in shown for name, (_, _, words) in CHANGES.items() if name != "migrate"), shown
    assert gaffer(lived_in, "audit", "items").stdout.count("items") == 2
    assert gaffer(lived_in, "audit", "target").stdout.count("table public.target ") == 4
    (newest,) = gaffer(lived_in, "audit", "--limit", "1", "--json").stdout.splitlines()
    assert {**json.loads(newest), "id": 0, "at": ""} == {
        "id": 0, "at": "", "by": "ann", "role": db.parse_url(lived_in)["user"], "reason": "a test wants it",
        "action": "register", "job": "defined", "details": {"as_new": False},
    }  # fmt: skip


def test_a_change_that_is_not_kept_is_found(lived_in: str) -> None:
    broken = Commands("gaffer")
    broken.add_command(Change("harm", callback=lambda operator: jobs.execute(lived_in, "delete from target")))
    assert gaffer(lived_in, "harm", *WHO, group=broken).exit_code == 0
    assert noted(lived_in, 0) == []


def test_what_cannot_be_taken_back_asks_and_changes_nothing_where_nobody_answers(lived_in: str, folder: Path) -> None:
    risky = {name for name, command in leaves() if isinstance(command, Risky)} - ELSEWHERE
    assert risky == {
        *("release", "watermark set", "watermark adopt", "items retry", "items drop"),
        *("protect", "unprotect", "prune", "rename", "retire"),
    }  # fmt: skip
    hold(lived_in)
    jobs.execute(lived_in, "update gaffer.alert set resolved_at = now() where resolved_at is null")
    before = kept(lived_in)
    for name in sorted(risky):
        if name.startswith("watermark"):
            jobs.execute(lived_in, "update gaffer.job_lease set lease_until = 'epoch'")
            before = kept(lived_in)
        done = change(lived_in, name, folder, *WHO)
        assert done.exit_code == 1, (name, done.output)
        assert "nobody to ask, and nothing was changed; where that is so, give --yes" in done.stderr, name
        assert kept(lived_in) == before, name
        if name == "release":
            hold(lived_in)
            before = kept(lived_in)


@pytest.mark.parametrize("words", [["rename", "copied", "b"], ["watermark", "set", "copied", "beginning"]])
def test_what_a_living_holder_makes_unsafe_is_refused(lived_in: str, words: list[str]) -> None:
    hold(lived_in)
    before = kept(lived_in)
    done = gaffer(lived_in, *words, "--yes")
    assert (done.exit_code, "is at work" in done.stderr) == (1, True), done.output
    assert kept(lived_in) == before


# ── bad words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_is_not_known_is_told_with_names_that_are_close(lived_in: str) -> None:
    for name in ("runs", "status", "ticks", "audit", "pause", "resume"):
        done = gaffer(lived_in, name, "copeid")
        assert done.exit_code == 1, name
        assert "no job 'copeid' is known to this database; perhaps 'copied' is meant" in done.stderr, name


@pytest.mark.parametrize(
    "words",
    [["status", "a\x1b[2Jb"], ["a\x1b[2Jb"], ["status", "--a\x1b[2Jb"], ["runs", "--limit", "\x1b[2J"], ["--\x1b[2J"]],
)  # fmt: skip
def test_what_was_typed_does_nothing_to_the_terminal(lived_in: str, words: list[str]) -> None:
    done = gaffer(lived_in, *words)
    assert done.exit_code in (1, 2)
    assert "\x1b" not in done.output
    assert "x1b" in done.output


def test_a_database_that_is_not_ours_and_a_role_without_rights_are_told(empty_url: str, stranger: str) -> None:
    for name in READS.keys() - {"simulate"}:  # it needs no database
        done = read(empty_url, name)
        assert (done.exit_code, "run: gaffer migrate" in done.stderr) == (2 if name == "check" else 1, True), name
        done = read(stranger, name)
        assert (done.exit_code, "a member of gaffer_runner" in done.stderr) == (2 if name == "check" else 1, True), name
