"""What keeps a pass of the watch from going on is named with its cure; a pass that is alive is no such thing."""

from __future__ import annotations

import psycopg
import pytest

from tests.support import jobs

PASS = "select gaffer.begin_pass('cron', '5 min', '{}')"


@pytest.fixture
def quiet(url: str) -> str:
    """Somebody looked, five minutes ago."""
    jobs.execute(url, PASS)
    jobs.execute(url, "update gaffer.watch set last_pass_at = last_pass_at - interval '5 min'")
    return url


def test_a_pass_that_is_alive_is_left_alone(quiet: str) -> None:
    """Two that look each five minutes come at once, and the second finds that the last pass was then."""
    with psycopg.connect(quiet) as other:
        other.execute("select gaffer.begin_pass('other', '5 min', '{}')")
        other.execute("set local idle_in_transaction_session_timeout = 0")  # it is at work
        assert jobs.query(quiet, PASS) == [(None,)]
        jobs.execute(quiet, "update gaffer.watch set last_pass_at = last_pass_at - interval '1 min'")
        with pytest.raises(psycopg.Error, match=f"backend {other.info.backend_pid} .*pg_terminate_backend"):
            jobs.query(quiet, PASS)


@pytest.mark.parametrize(
    "text", ["select gaffer.note_learnt('cron', now())", "lock table gaffer.watch in exclusive mode"]
)
def test_who_locks_what_a_pass_writes_is_named(quiet: str, text: str) -> None:
    with psycopg.connect(quiet) as other:
        other.execute(text.encode())
        with pytest.raises(psycopg.Error, match=f"backend {other.info.backend_pid} .*pg_terminate_backend") as refused:
            jobs.query(quiet, PASS)
        assert refused.value.sqlstate == "GF010"


def test_a_turn_whose_row_was_lost_is_made_again(quiet: str) -> None:
    jobs.execute(quiet, "delete from gaffer.watch_turn")
    with psycopg.connect(quiet) as first:
        ((began,),) = first.execute("select gaffer.begin_pass('first', '1 min', '{}')").fetchall()
        assert began is not None
        assert jobs.query(quiet, PASS) == [(None,)]
    assert jobs.query(quiet, "select is_only from gaffer.watch_turn") == [(True,)]
