"""Notices reach their receivers: at least once, under one key, in order, together where they are many, and only those
that a receiver is told of."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.bounds import Bounds
from gaffer_dagster.domain.due import NewRows
from gaffer_dagster.domain.schedule import Schedule
from gaffer_dagster.domain.spec import JobSpec
from gaffer_dagster.engine import heartbeat, receivers, watch
from gaffer_dagster.engine.deliver import Delivered, deliver
from gaffer_dagster.engine.watch import Watcher
from gaffer_dagster.store import deliveries
from gaffer_dagster.testing import Clock
from tests.support import jobs, protocol, variants
from tests.support.receivers import CLAIMED, SENT, HttpReceiver, Sender, Senders

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
SLACK = "GAFFER_RECEIVER_SLACK"
CANARY = "sw0rdf1sh"


@pytest.fixture
def server() -> Iterator[HttpReceiver]:
    with HttpReceiver() as made:
        yield made


@pytest.fixture
def senders() -> Iterator[Senders]:
    with Senders() as made:
        yield made


def to(server: HttpReceiver, variable: str = SLACK, **settings: str) -> dict[str, str]:
    """The environment of a process that knows a receiver at this server."""
    given = {"PRIVATE": "1", **settings}
    return {
        variable: server.url + "/" + variable.lower(),
        **{f"{variable}_{name}": each for name, each in given.items()},
    }


def tell(url: str, environment: dict[str, str], **given: Any) -> Delivered:
    with protocol.session(url) as connection:
        return deliver(connection, receivers.receivers_from(environment, jobs.LOG), jobs.LOG, **given)


def job(url: str, name: str = "nightly", alerts: Alerts | None = None) -> str:
    due = NewRows("source", "id")
    with protocol.session(url) as connection:
        protocol.register(
            connection, JobSpec(name, due, Schedule("0 2 * * *"), Bounds(timeout="5m"), alerts=alerts or Alerts())
        )
    return name


def opens(url: str, of: str, kind: str = "absence", *, severity: str = "error", **details: Any) -> int:
    """What a pass does when it finds something."""
    return jobs.query(
        url,
        """
        insert into gaffer.alert (job, kind, severity, since_at, opened_at, details)
        values (%s, %s, %s, gaffer.clock() - interval '5 minutes', gaffer.clock(), %s) returning id
        """,
        of, kind, severity, Jsonb({"tick": "2027-03-01T02:00:00+00:00", **details}),
    )[0][0]  # fmt: skip


def resolves(url: str, alert: int) -> None:
    jobs.execute(url, "update gaffer.alert set resolved_at = gaffer.clock() where id = %s", alert)


def reminds(url: str, alert: int, **details: Any) -> None:
    jobs.execute(
        url,
        "update gaffer.alert set reminders = reminders + 1, reminded_at = gaffer.clock(), details = details || %s"
        " where id = %s",
        Jsonb(details), alert,
    )  # fmt: skip


def mutes(url: str, of: str, length: timedelta | None) -> None:
    jobs.query(url, "select gaffer.mute(%s, gaffer.clock() + %s, 'ada', 'known')", of, length)


def events(server: HttpReceiver) -> list[tuple[str, int]]:
    return [(each["event"], each["incident"]) for each in server.messages]


def delivered(url: str, receiver: str = "slack") -> list[tuple[str, int]]:
    return jobs.query(
        url,
        "select notice, alert from gaffer.alert_delivery where receiver = %s and delivered_at is not null order by id",
        receiver,
    )


# ── once, and in order ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_incident_is_told_when_it_opens_and_when_it_is_over_and_no_more(url: str, server: HttpReceiver) -> None:
    alert = opens(url, job(url))
    for _ in range(3):
        tell(url, to(server))
    resolves(url, alert)
    for _ in range(3):
        tell(url, to(server))
    assert events(server) == [("opened", alert), ("resolved", alert)]
    assert len(set(server.keys)) == 2
    assert {each["incident_key"] for each in server.messages} == {
        str(jobs.query(url, "select key from gaffer.alert")[0][0])
    }
    assert "is on time again" in server.messages[1]["title"]


def test_the_same_notice_has_the_same_key_whoever_sends_it(url: str, server: HttpReceiver) -> None:
    opens(url, job(url))
    tell(url, to(server))
    jobs.execute(url, "delete from gaffer.alert_delivery")  # as after a restore
    tell(url, to(server))
    assert len(server.keys) == 2
    assert len(set(server.keys)) == 1


def test_opened_is_told_before_resolved_though_the_incident_is_over(
    url: str, server: HttpReceiver, clock: Clock
) -> None:
    alert = opens(url, job(url))
    server.answers = [500]
    tell(url, to(server))
    resolves(url, alert)
    tell(url, to(server))
    assert events(server) == [("opened", alert)]  # its turn is in a minute, and the other waits for it
    clock.advance(MINUTE)
    tell(url, to(server))
    assert events(server) == [("opened", alert), ("opened", alert), ("resolved", alert)]
    assert "before this could be sent" in server.messages[1]["text"]


def test_an_incident_that_nobody_could_tell_in_time_is_told_all_the_same(url: str, server: HttpReceiver) -> None:
    tell(url, to(server))
    alert = opens(url, job(url))
    resolves(url, alert)
    tell(url, to(server))
    assert events(server) == [("opened", alert), ("resolved", alert)]


def test_the_resolved_notice_comes_however_long_the_receiver_was_away(
    url: str, server: HttpReceiver, clock: Clock
) -> None:
    alert = opens(url, job(url))
    tell(url, to(server))
    clock.advance(5 * DAY)
    resolves(url, alert)
    clock.advance(5 * DAY)
    tell(url, to(server))
    assert events(server) == [("opened", alert), ("resolved", alert)]


def test_a_reminder_tells_the_newest_numbers_once(url: str, server: HttpReceiver, clock: Clock) -> None:
    alert = opens(url, job(url), "failures", failures=3)
    tell(url, to(server))
    for failures in (20, 40):
        clock.advance(DAY)
        reminds(url, alert, failures=failures)
    for _ in range(2):
        tell(url, to(server))
    assert events(server) == [("opened", alert), ("reminded", alert)]
    assert server.messages[1]["reminder"] == 2
    assert "40 ticks in a row failed" in server.messages[1]["title"]


def test_reminders_of_a_receiver_that_is_down_do_not_pile_up(url: str, server: HttpReceiver, clock: Clock) -> None:
    alert = opens(url, job(url))
    tell(url, to(server))
    for _ in range(3):
        clock.advance(DAY)
        reminds(url, alert)
        server.answers = [500]
        tell(url, to(server))
    clock.advance(2 * HOUR)
    tell(url, to(server))
    assert [each["reminder"] for each in server.messages] == [None, 1, 2, 3, 3]
    clock.advance(DAY)
    reminds(url, alert)
    resolves(url, alert)
    tell(url, to(server))
    assert events(server)[5:] == [("resolved", alert)]


def test_who_has_just_been_told_is_not_reminded_of_what_was_before(
    url: str, server: HttpReceiver, clock: Clock
) -> None:
    alert = opens(url, job(url))
    clock.advance(DAY)
    reminds(url, alert)
    tell(url, to(server))
    assert events(server) == [("opened", alert)]


# ── who is told of what ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_receiver_gets_what_is_as_severe_as_it_asks_for(url: str, server: HttpReceiver) -> None:
    name = job(url)
    warning, error = opens(url, name, "parked", severity="warning"), opens(url, name)
    resolves(url, warning)
    tell(url, to(server, SEVERITY="error"))
    assert events(server) == [("opened", error)]
    assert delivered(url, "log") == [("opened", error)]  # the other was over before anybody was seen
    opens(url, name, "parked", severity="warning")
    tell(url, to(server, SEVERITY="error"))
    assert len(server.messages) == 1
    assert len(delivered(url, "log")) == 2


def test_a_job_is_told_to_those_that_it_names_and_a_watch_to_all(url: str, server: HttpReceiver) -> None:
    known = to(server) | to(server, "GAFFER_RECEIVER_ONCALL")
    opens(url, job(url, "named", Alerts(receivers=["oncall"])))
    opens(url, job(url, "open"))
    jobs.execute(
        url,
        """
        insert into gaffer.alert (watch, kind, severity, since_at, opened_at, details)
        values ('check:host', 'watch', 'error', gaffer.clock(), gaffer.clock(),
                '{"last_pass_at": "2027-03-01T02:00+00:00"}')
        """,
    )
    tell(url, known)
    told = {(path, each["job"] or each["watch"]) for path, each in zip(server.paths, server.messages, strict=True)}
    oncall, slack = "/gaffer_receiver_oncall", "/gaffer_receiver_slack"
    assert told == {
        (oncall, "named"), (oncall, "open"), (slack, "open"), (oncall, "check:host"), (slack, "check:host"),
    }  # fmt: skip
    assert len(delivered(url, "log")) == 3


def test_a_process_that_lacks_the_variable_leaves_it_to_one_that_has_it(url: str, server: HttpReceiver) -> None:
    alert = opens(url, job(url, alerts=Alerts(receivers=["slack"])))
    tell(url, {})
    assert server.messages == []
    assert delivered(url, "log") == [("opened", alert)]
    tell(url, to(server))
    assert events(server) == [("opened", alert)]


def test_a_receiver_that_nobody_knows_is_named(url: str, server: HttpReceiver, clock: Clock) -> None:
    job(url, alerts=Alerts(receivers=["slack", "log"]))
    job(url, "other", alerts=Alerts(receivers=["slack"]))
    job(url, "free")
    with protocol.session(url) as connection:
        (said,) = deliveries.unserved(connection)
        assert "'nightly' and 1 more names the receiver 'slack'" in said
        assert SLACK in said
        tell(url, to(server))
        assert deliveries.unserved(connection) == []
        clock.advance(2 * DAY)
        assert len(deliveries.unserved(connection)) == 1


def test_a_receiver_is_told_of_what_is_open_when_it_is_first_seen_and_of_nothing_older(
    url: str, server: HttpReceiver, clock: Clock
) -> None:
    name = job(url)
    over = opens(url, name)
    tell(url, {})
    resolves(url, over)
    still = opens(url, name, "failures")
    clock.advance(timedelta(seconds=1))
    tell(url, to(server))
    resolves(url, still)
    tell(url, to(server))
    assert events(server) == [("opened", still), ("resolved", still)]


# ── mute ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_told_within_a_mute_and_what_is_still_open_after_it(
    url: str, server: HttpReceiver, clock: Clock
) -> None:
    name = job(url)
    mutes(url, name, 3 * HOUR)
    brief, long = opens(url, name), opens(url, name, "failures")
    tell(url, to(server))
    clock.advance(HOUR)
    resolves(url, brief)
    tell(url, to(server))
    assert server.messages == []
    assert delivered(url, "log") == [("opened", brief), ("opened", long), ("resolved", brief)]  # which is never muted
    clock.advance(2 * HOUR)
    tell(url, to(server))
    resolves(url, long)
    tell(url, to(server))
    assert events(server) == [("opened", long), ("resolved", long)]


def test_what_opened_and_was_over_within_a_mute_is_not_told_though_the_mute_is_lifted(
    url: str, server: HttpReceiver, clock: Clock
) -> None:
    name = job(url)
    tell(url, to(server))
    mutes(url, name, 3 * HOUR)
    resolves(url, opens(url, name))
    clock.advance(MINUTE)
    mutes(url, name, None)
    clock.advance(MINUTE)
    tell(url, to(server))
    assert server.messages == []
    later = opens(url, name)  # in what would still be the mute
    resolves(url, later)
    tell(url, to(server))
    assert events(server) == [("opened", later), ("resolved", later)]


def test_that_a_told_incident_is_over_is_told_after_the_mute(url: str, server: HttpReceiver, clock: Clock) -> None:
    name = job(url)
    alert = opens(url, name)
    tell(url, to(server))
    mutes(url, name, 3 * HOUR)
    resolves(url, alert)
    tell(url, to(server))
    assert events(server) == [("opened", alert)]
    clock.advance(4 * HOUR)
    tell(url, to(server))
    assert events(server) == [("opened", alert), ("resolved", alert)]


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_five_at_once_are_five_messages_and_six_are_one(url: str, server: HttpReceiver) -> None:
    for number in range(5):
        opens(url, job(url, f"job_{number}"))
    tell(url, to(server))
    assert [each["event"] for each in server.messages] == 5 * ["opened"]
    for number in range(6):
        opens(url, f"job_{number}" if number < 5 else job(url, "job_5"), "failures")
    tell(url, to(server))
    assert [each["event"] for each in server.messages[5:]] == ["grouped"]
    assert len(server.messages[5]["notices"]) == 6


def test_fifty_are_one_message_which_later_ones_do_not_join(url: str, server: HttpReceiver, clock: Clock) -> None:
    for number in range(50):
        opens(url, job(url, f"job_{number:02}"))
    server.answers = [500]
    tell(url, to(server))
    later = opens(url, "job_00", "failures")
    tell(url, to(server))
    clock.advance(MINUTE)
    tell(url, to(server))
    first, single, again = server.messages
    assert (first["event"], single["event"], again["event"]) == ("grouped", "opened", "grouped")
    assert single["incident"] == later
    assert first == again
    assert server.keys[0] == server.keys[2] == first["key"]
    assert len(again["notices"]) == 50
    assert again["counts"] == {"opened": {"absence": 50}}
    assert sum(f"job_{number:02}: " in again["text"] for number in range(50)) == 20
    assert "… and 30 more, of 30 other jobs" in again["text"]
    assert len(delivered(url)) == 51


def test_what_was_tried_before_joins_no_group(url: str, server: HttpReceiver, clock: Clock) -> None:
    job(url)
    mutes(url, "nightly", MINUTE)
    for number in range(6):
        opens(url, "nightly", ("absence", "failures", "stalled", "backlog", "parked", "capped")[number])
    single = opens(url, job(url, "weekly"))
    server.answers = [500]
    tell(url, to(server))
    clock.advance(MINUTE)
    tell(url, to(server))
    first, group, again = server.messages
    assert (first["incident"], group["event"], again["incident"]) == (single, "grouped", single)
    assert len(group["notices"]) == 6
    assert first["key"] == again["key"] != group["key"]


def test_a_group_is_sent_though_one_of_its_jobs_was_muted_meanwhile(
    url: str, server: HttpReceiver, clock: Clock
) -> None:
    for number in range(6):
        opens(url, job(url, f"job_{number}"))
    server.answers = [500]
    tell(url, to(server))
    mutes(url, "job_0", HOUR)
    clock.advance(MINUTE)
    tell(url, to(server))
    assert len(delivered(url)) == 6


def test_b103_after_an_outage_those_in_time_are_silent_and_the_others_one_message(
    url: str, server: HttpReceiver, clock: Clock
) -> None:
    jobs.make_source(url, 1)
    hour = clock.now().replace(minute=10, second=0, microsecond=0) + HOUR
    clock.set(hour)
    specs = [
        JobSpec(
            f"job_{number:02}",
            NewRows("source", "id"),
            Schedule("0 * * * *"),
            Bounds(timeout="5m"),
            Alerts(grace="30m"),
        )
        for number in range(50)
    ]
    watcher = Watcher("test", timedelta(seconds=30))
    with protocol.session(url) as connection:
        for each in specs:
            protocol.register(connection, each)
        watch.look(connection, watcher)
        clock.set(hour + 3 * HOUR)  # the database was away
        watch.look(connection, watcher)
        tell(url, to(server))
        for each in specs[:25]:
            jobs.run(each, url, lambda _: None, worker_clock=clock.now)
        for minutes in (29, 31, 32):
            clock.set(hour + 3 * HOUR + minutes * MINUTE)
            watch.look(connection, watcher)
            tell(url, to(server))
    (message,) = server.messages
    assert {each["job"] for each in message["notices"]} == {each.name for each in specs[25:]}
    assert message["counts"] == {"opened": {"absence": 25}}


def not_told(url: str) -> Sequence[str]:
    """As `gaffer check` says it, whoever tried in vain."""
    with protocol.session(url) as connection:
        return watch.examine(connection).problems


# ── at least once ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_b92_a_500_then_silence_then_200_is_one_key_and_delivered_with_the_200(
    url: str, server: HttpReceiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "_WEBHOOK_LIMIT", timedelta(seconds=2))
    alert = opens(url, job(url))
    server.answers = [500, "silence"]
    state = "select failing_since is not null, error from gaffer.receiver where name = 'slack'"
    told = tell(url, to(server))
    assert (told.failed, told.left, delivered(url)) == (["slack"], 1, [])
    assert jobs.query(url, state) == [(True, "status 500")]
    assert tell(url, to(server)).failed == []  # not before its time
    assert [each.rpartition(" since ")[0] for each in not_told(url)] == ["receiver slack has taken no message"]
    clock.advance(MINUTE)
    assert tell(url, to(server)).failed == ["slack"]
    assert jobs.query(url, state) == [(True, "no answer within 2 s")]
    assert delivered(url) == []
    clock.advance(2 * MINUTE)
    told = tell(url, to(server))
    assert (told.sent, told.failed, told.left) == (1, [], 0)
    assert jobs.query(url, state) == [(False, None)]
    assert not_told(url) == []
    assert delivered(url) == [("opened", alert)]
    assert len(server.keys) == 3
    assert len(set(server.keys)) == 1


def test_attempts_grow_rarer_up_to_one_in_an_hour(url: str, server: HttpReceiver, clock: Clock) -> None:
    opens(url, job(url))
    waits: list[timedelta] = []
    for _ in range(12):
        server.answers = [503]
        assert tell(url, to(server)).failed == ["slack"]
        ((wait,),) = jobs.query(
            url, "select next_attempt_at - gaffer.clock() from gaffer.alert_delivery where receiver = 'slack'"
        )
        waits.append(wait)
        clock.advance(wait)
    assert timedelta(seconds=25) < waits[0] <= MINUTE
    assert waits[3] > 3 * MINUTE
    assert all(HOUR / 2 - MINUTE < wait <= HOUR for wait in waits[7:])


def test_a_clock_that_ran_ahead_puts_no_attempt_off_for_long(url: str, server: HttpReceiver, clock: Clock) -> None:
    clock.advance(30 * DAY)
    alert = opens(url, job(url))
    server.answers = [500]
    tell(url, to(server))
    clock.advance(-30 * DAY)
    tell(url, to(server))
    assert delivered(url) == [("opened", alert)]


def killed(
    url: str, server: HttpReceiver, senders: Senders, clock: Clock, place: str, *, marks_first: bool = False
) -> None:
    """A sender dies there, and another one passes a minute later."""
    opens(url, job(url))
    if place == "sending":
        server.answers = ["wait"]
    sender = senders.start(Sender(url, to(server), stop_at=place, marks_first=marks_first))
    if place == "sending":
        assert server.arrived.acquire(timeout=40)
    else:
        sender.reaches(place)
    sender.kill()
    server.release()
    tell(url, to(server))
    assert len(server.keys) == (0 if place == CLAIMED else 1), "it is claimed for a minute"
    clock.advance(MINUTE)
    tell(url, to(server))


@pytest.mark.parametrize(("place", "times"), [(CLAIMED, 1), ("sending", 2), (SENT, 2)])
def test_b92_a_sender_killed_before_during_or_after_the_send_loses_nothing(
    url: str, server: HttpReceiver, senders: Senders, clock: Clock, place: str, times: int
) -> None:
    killed(url, server, senders, clock, place)
    assert len(server.keys) == times
    assert len(set(server.keys)) == 1
    assert len(delivered(url)) == 1


def test_b92_noted_before_it_is_sent_it_is_lost(url: str, server: HttpReceiver, senders: Senders, clock: Clock) -> None:
    killed(url, server, senders, clock, CLAIMED, marks_first=True)
    assert len(delivered(url)) == 1
    assert server.keys == []


def many_senders(url: str, server: HttpReceiver, senders: Senders) -> Counter[str]:
    """Four processes at once, twenty messages for four receivers; how often each was sent."""
    known: dict[str, str] = {}
    for name in "ABCD":
        known |= to(server, f"GAFFER_RECEIVER_{name}")
    for number in range(5):
        opens(url, job(url, f"job_{number}"))
    server.answers = ["wait", "wait", "wait", "wait"]
    started = [senders.start(Sender(url, known)) for _ in range(4)]
    for _ in range(4):
        assert server.arrived.acquire(timeout=40)
    server.release()
    for each in started:
        assert each.ends().counts["failed"] == 0
    tell(url, known)
    return Counter(zip(server.paths, server.keys, strict=True))


def test_two_processes_at_once_send_nothing_twice(url: str, server: HttpReceiver, senders: Senders) -> None:
    sent = many_senders(url, server, senders)
    assert (len(sent), max(sent.values())) == (20, 1)


def test_claimed_without_putting_off_the_next_attempt_it_is_sent_twice(
    url: str, server: HttpReceiver, senders: Senders
) -> None:
    variants.replace(url, "claim_notices", {"next_attempt_at = v_now + interval '1 minute'": "next_attempt_at = v_now"})
    assert max(many_senders(url, server, senders).values()) > 1


def test_a_sender_that_stands_still_keeps_nobody_from_sending(
    url: str, server: HttpReceiver, senders: Senders, clock: Clock
) -> None:
    first = opens(url, job(url))
    server.answers = ["wait"]
    frozen = senders.start(Sender(url, to(server)))
    assert server.arrived.acquire(timeout=40)
    frozen.pause()
    second = opens(url, job(url, "weekly"))
    tell(url, to(server))
    assert delivered(url) == [("opened", second)]
    clock.advance(MINUTE)
    tell(url, to(server))
    assert delivered(url) == [("opened", first), ("opened", second)]
    server.release()
    frozen.resume()
    assert frozen.ends().counts == {"sent": 1, "failed": 0}
    tell(url, to(server))
    assert Counter(server.keys).most_common(1)[0][1] == 2  # never more than twice


def test_what_was_claimed_long_ago_is_not_sent_any_more(
    url: str, server: HttpReceiver, senders: Senders, clock: Clock
) -> None:
    opens(url, job(url))
    frozen = senders.start(Sender(url, to(server), stop_at=CLAIMED, fresh=0))
    frozen.reaches(CLAIMED)
    clock.advance(MINUTE)
    tell(url, to(server))
    frozen.go()
    assert frozen.ends().counts == {"sent": 0, "failed": 0}
    assert len(server.keys) == 1


def test_a_process_that_asks_while_another_does_is_not_kept_waiting(url: str, server: HttpReceiver) -> None:
    tell(url, to(server))
    opens(url, job(url))
    with jobs.connect(url) as other, other.transaction():
        other.execute("select from gaffer.receiver for update")
        assert tell(url, to(server)).sent == 0
    assert tell(url, to(server)).sent == 2


def test_who_hangs_has_the_last_turn(url: str, server: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "_WEBHOOK_LIMIT", timedelta(seconds=2))
    known = to(server, "GAFFER_RECEIVER_A") | to(server, "GAFFER_RECEIVER_B")
    name = job(url)
    opens(url, name)
    server.answers = ["silence"]
    told = tell(url, known, budget=timedelta(seconds=1.5))
    assert (told.sent, told.failed) == (1, ["a"])  # the log, and then the budget was over
    opens(url, name, "failures")
    tell(url, known, budget=timedelta(seconds=1.5))
    assert server.paths[1] == "/gaffer_receiver_b"


def test_one_that_is_set_up_wrongly_silences_nobody_else(url: str, server: HttpReceiver) -> None:
    alert = opens(url, job(url))
    told = tell(url, to(server) | {"GAFFER_RECEIVER_ONCALL": f"htps//{CANARY}", "GAFFER_RECEIVER_X_SEVERITY": "error"})
    assert (told.sent, told.failed) == (2, ["oncall", "x"])
    assert events(server) == [("opened", alert)]
    ((oncall,), (x,)) = jobs.query(url, "select error from gaffer.receiver where name in ('oncall', 'x') order by name")
    assert "GAFFER_RECEIVER_ONCALL" in oncall
    assert "GAFFER_RECEIVER_X is empty, or not set" in x
    assert CANARY not in oncall


def test_receivers_tell_how_it_goes(url: str, server: HttpReceiver) -> None:
    opens(url, job(url))
    server.answers = [500]
    tell(url, to(server))
    with protocol.session(url) as connection:
        log, slack = deliveries.receivers(connection)
    assert (log.name, log.failing_since, log.waiting) == ("log", None, 0)
    assert (slack.name, slack.error, slack.waiting) == ("slack", "status 500", 1)


def test_the_log_is_told_how_severe_it_is(url: str, caplog: pytest.LogCaptureFixture) -> None:
    name = job(url)
    alerts = [opens(url, name), opens(url, name, "parked", severity="warning", rows=3)]
    with caplog.at_level(logging.INFO, "gaffer"):
        tell(url, {})
        for each in alerts:
            resolves(url, each)
        tell(url, {})
    levels = [(each.levelname, each.gaffer["event"], each.gaffer["kind"]) for each in caplog.records]  # type: ignore[attr-defined]
    assert levels == [
        ("ERROR", "alert opened", "absence"), ("WARNING", "alert opened", "parked"),
        ("INFO", "alert resolved", "absence"), ("INFO", "alert resolved", "parked"),
    ]  # fmt: skip
    assert "3 rows failed too often" in caplog.records[1].getMessage()


def test_no_secret_of_a_receiver_is_in_a_table_a_log_or_a_message(
    url: str, server: HttpReceiver, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receivers, "_WEBHOOK_LIMIT", timedelta(seconds=1))
    where = f"127.0.0.1:{server.port}/{CANARY}?token={CANARY}#{CANARY}"
    known = {
        SLACK: f"http://{CANARY}:{CANARY}@{where}",
        f"{SLACK}_PRIVATE": "1",
        "GAFFER_RECEIVER_DEAD": f"https://{CANARY}:{CANARY}@127.0.0.1:1/{CANARY}",
        "GAFFER_RECEIVER_DEAD_PRIVATE": "1",
        "GAFFER_RECEIVER_CLEAR": f"http://{CANARY}@{where}",
        "GAFFER_RECEIVER_ODD": f"https://{CANARY}:{CANARY}@[::{CANARY}/{CANARY}",
        "GAFFER_RECEIVER_PORT": f"https://host:{CANARY}/",
        "GAFFER_RECEIVER_MAIL": f"mailto://{CANARY}:{CANARY}@127.0.0.1:1?from=a@example.org&to={CANARY}@example.org&mode=insecure",
        "GAFFER_RECEIVER_HOOK": f"json://{CANARY}:{CANARY}@127.0.0.1:1/{CANARY}",
        "GAFFER_RECEIVER_NONE": f"nothing://{CANARY}",
        "PING_URL": f"http://{CANARY}:{CANARY}@{where}",
    }
    name = job(url, alerts=Alerts(heartbeat="PING_URL"))
    opens(url, name)
    jobs.execute(url, "update gaffer.job set last_success_at = gaffer.clock() + interval '1 s'")
    server.answers = [500, "redirect", "garbage", "silence"]
    with caplog.at_level(1), protocol.session(url) as connection:
        for _ in range(10):
            tell(url, known)
            heartbeat.beat("PING_URL", known, jobs.LOG)
            heartbeat.beat_for_jobs(connection, known, jobs.LOG)
            clock.advance(HOUR)
            if jobs.query(url, "select from gaffer.receiver where name = 'slack' and failing_since is null"):
                break
    errors = dict(jobs.query(url, "select name, error from gaffer.receiver"))
    assert len(errors) == 9
    assert {name for name, error in errors.items() if error is None} == {"log", "slack"}
    tables = jobs.query(url, "select tablename from pg_tables where schemaname = 'gaffer'")
    stored = [jobs.query(url, f"select t::text from gaffer.{table} t") for (table,) in tables]
    seen = f"{stored} {caplog.text} {server.messages} {receivers.receivers_from(known, jobs.LOG)}"
    assert "not delivered" in seen
    assert "PING_URL" in seen
    assert CANARY not in seen, seen[max(0, seen.index(CANARY) - 200) :][:400]
    assert any(CANARY in path for path in server.paths)  # it went where it should


@pytest.mark.parametrize(("status", "why"), [(500, "Internal server error"), (403, "error=403")])
def test_what_apprise_warns_of_is_kept_and_logged_without_the_urls_parts(
    url: str, server: HttpReceiver, caplog: pytest.LogCaptureFixture, status: int, why: str
) -> None:
    opens(url, job(url))
    server.answers = [status]
    where = f"json://us{CANARY}:{CANARY}@localhost:{server.port}/{CANARY}/x?+X-Key={CANARY}"
    with caplog.at_level(1):
        tell(url, {"GAFFER_RECEIVER_HOOK": where})
    ((error,),) = jobs.query(url, "select error from gaffer.receiver where name = 'hook'")
    assert error.startswith(f"Apprise failed with status {status}: Failed to send JSON POST notification: {why}")
    assert error in caplog.text
    assert CANARY not in caplog.text + error
    assert CANARY in server.paths[0]


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_success_of_a_job_is_a_heartbeat_at_least_once(url: str, server: HttpReceiver, clock: Clock) -> None:
    known = {"NIGHTLY_PING": server.url + "/nightly", "NIGHTLY_PING_PRIVATE": "1"}
    succeeds = "update gaffer.job set last_success_at = gaffer.clock() where name = 'nightly'"
    job(url, alerts=Alerts(heartbeat="NIGHTLY_PING"))
    job(url, "other", alerts=Alerts(heartbeat="OTHER_PING"))
    job(url, "free")
    with protocol.session(url) as connection:

        def beats(environment: dict[str, str]) -> int:
            return heartbeat.beat_for_jobs(connection, environment, jobs.LOG)

        assert beats(known) == 0
        clock.advance(MINUTE)
        jobs.execute(url, "update gaffer.job set last_success_at = gaffer.clock()")
        assert beats({}) == 0  # it is left to somebody who knows the URL
        server.answers = [500]
        assert beats(known) == 0
        assert beats(known) == 1
        assert beats(known) == 0
        clock.advance(MINUTE)
        jobs.execute(url, succeeds)
        assert beats(known) == 1
    assert server.paths == 3 * ["/nightly"]


def test_a_heartbeat_that_is_not_taken_is_logged_and_no_error(
    server: HttpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"PING": server.url, "PING_PRIVATE": "1", "BAD": "nowhere", "LOCAL": server.url.replace("http", "https")}
    assert heartbeat.beat("PING", known, jobs.LOG)
    assert not heartbeat.beat("NOT_THERE", known, jobs.LOG)
    assert caplog.text == ""
    assert not heartbeat.beat("BAD", known, jobs.LOG)
    assert not heartbeat.beat("LOCAL", known, jobs.LOG)
    assert "LOCAL_PRIVATE=1" in caplog.text
