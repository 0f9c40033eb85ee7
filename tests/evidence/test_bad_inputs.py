"""The short form of `./dev fuzz`: some thousand bad inputs, and what the judge would find if a rule were broken.

GAFFER_FUZZ_INPUTS sets how many, GAFFER_FUZZ_SEED repeats the choices of an earlier run.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from gaffer_dagster.adapter import metadata
from gaffer_dagster.domain import alert, cron, due, duration, page, spec
from gaffer_dagster.engine import deliver
from gaffer_dagster.errors import BadInputError
from gaffer_dagster.store import db, payload
from tests.evidence import bad_inputs, bad_inputs_at_work, fuzz

SEED = int(os.environ.get("GAFFER_FUZZ_SEED", 0)) or random.SystemRandom().randrange(1, 1_000_000)
INPUTS = int(os.environ.get("GAFFER_FUZZ_INPUTS", 1_800))


def test_a_bad_input_ends_in_a_clear_error_or_in_correct_work_and_shows_no_secret(url: str) -> None:
    report = fuzz.whole(url, SEED, INPUTS)
    print(f"seed {SEED}, {INPUTS:,} inputs\n{report}")
    assert report.faults == [], f"seed {SEED}\n{report}"
    for kind in ("cron and zone", "job's name", "configuration", "job that is stored"):
        assert report.outcomes[kind]["worked"], f"no input of {kind!r} was good enough to be judged"


def kinds() -> dict[str, bad_inputs.Kind]:
    return {kind.name: kind for kind in [*bad_inputs.pure(), *bad_inputs_at_work.with_dagster()]}


def repeating(name: str, given: Any) -> bad_inputs.Kind:
    known = kinds()[name]
    return bad_inputs.Kind(name, 1, lambda _: given, known.take, known.foreign)


def told(kind: bad_inputs.Kind, inputs: int) -> str:
    report = fuzz.fuzz([kind], SEED, inputs)
    print(f"seed {SEED}\n{report}")
    return " ".join(what for _, what, _ in report.faults)


def _repeats_the_url(text: str) -> dict[str, Any]:
    raise BadInputError(f"the database URL {text!r} cannot be read; mend it")


def test_a_parser_that_repeats_the_url_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kinds()["database URL"]
    assert told(kind, 50) == ""
    monkeypatch.setattr(db, "parse_url", _repeats_the_url)
    assert fuzz.LEAK in told(kind, 50)


def test_passwords_that_are_not_struck_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "_PASSWORD", re.compile(r"(?<=://)([^:/@\s]*):[^@\s]+@|(password\s*=\s*)\S+"))
    assert fuzz.LEAK in told(kinds()["URL in an error"], 200)


@pytest.mark.parametrize("shown", ["page", "message"])
def test_a_page_or_a_message_that_shows_it_is_found(url: str, monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    """They get the run with what the user's error says; the table, the log and the command do not."""
    with bad_inputs_at_work.world(url) as made:
        known = {kind.name: kind for kind in bad_inputs_at_work.with_database(made)}["run that fails"]
        given = ("RuntimeError", f"cannot reach postgresql://me:{bad_inputs.CANARY}@127.0.0.1:1/db")
        kind = bad_inputs.Kind("made", 1, lambda _: given, known.take, known.foreign)
        assert told(kind, 1) == ""
        if shown == "page":
            real = page._headline
            monkeypatch.setattr(page, "_headline", lambda *args: f"{real(*args)} {given[1]}")
        else:
            write = deliver.write
            monkeypatch.setattr(deliver, "write", lambda *args: _with(write(*args), given[1]))
        assert fuzz.LEAK in told(kind, 1)


def _with(message: Any, text: str) -> Any:
    return dataclasses.replace(message, payload={**message.payload, "text": text})


def test_a_secret_in_another_form_is_found() -> None:
    for shown in (
        bad_inputs.CANARY.upper(),
        "Authorization: Basic bWU6S2FuYXJpZW52b2dlbDdxCg==",
        "xS2FuYXJpZW52b2dlbDdxx",
    ):
        assert fuzz.leaked(["nothing", f"it was {shown}"]) is not None
    assert fuzz.leaked(["a canary bird", "Kanarienvogel"]) is None


def test_a_secret_in_what_an_error_came_of_is_found() -> None:
    def take(_given: Any, _told: Any) -> None:
        try:
            raise ValueError(bad_inputs.CANARY)
        except ValueError as error:
            raise BadInputError("the value cannot be read; mend it") from error

    assert fuzz.LEAK in told(bad_inputs.Kind("made", 1, lambda _: None, take), 1)


def test_what_the_database_cannot_keep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "is_text", lambda value: isinstance(value, str))
    given = bad_inputs._config(random.Random(1))[:]
    given[1] = bad_inputs.Given(due.NewRows, {"table": "t", "key": "\ud800"})
    given = [
        given[0],
        given[1],
        *(bad_inputs.Given(each.what, {}) for each in given[2:4]),
        bad_inputs.Given(given[4].what, {"name": "a"}),
    ]
    given[0] = bad_inputs.Given(given[0].what, {"cron": "0 6 * * *"})
    assert "the database cannot keep" in told(repeating("configuration", given), 1)


def test_metadata_that_is_handed_on_as_it_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_is_taken", lambda value: True)
    assert "Error in" in told(kinds()["metadata"], 60)


def test_an_error_of_pythons_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(receivers: Any) -> tuple[str, ...]:
        return tuple(receivers)

    monkeypatch.setattr(alert, "_names", names)
    given = [bad_inputs.Given(alert.Alerts, {"receivers": 3})]
    take: Callable[..., Any] = lambda given, _: bad_inputs._made(given[0])  # noqa: E731
    assert "TypeError in names" in told(bad_inputs.Kind("made", 1, lambda _: given, take), 1)


@pytest.mark.parametrize(
    "text",
    [
        "something went wrong in line 3",
        "I do not take this",
        "cannot see this at all here",
        "invalid literal for int() with base 10: 'x'",
        "mend it",
    ],
)
def test_an_error_that_says_no_cure_is_found(text: str) -> None:
    def take(_given: Any, _told: Any) -> None:
        raise BadInputError(text)

    assert "no cure" in told(bad_inputs.Kind("made", 1, lambda _: None, take), 1)


def test_a_walk_that_finds_no_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "LIMIT", 0.3)
    never = ("0 0 30 2 *", "UTC", {}, "a", bad_inputs.datetime(2024, 1, 1, tzinfo=bad_inputs.UTC))
    assert told(repeating("cron and zone", never), 1) == ""
    monkeypatch.setattr(cron, "_can_fire", lambda line: True)
    assert "more than 0.3 s of the processor" in told(repeating("cron and zone", never), 1)


def test_a_pattern_that_tries_everything_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "LIMIT", 0.3)
    text = "9" * 60
    assert told(repeating("duration", text), 1) == ""
    monkeypatch.setattr(duration, "_WHOLE", re.compile(r"(?:(?:\d+\.?\d*)+(ms|[dhms]))+"))
    assert "more than 0.3 s of the processor" in told(repeating("duration", text), 1)


def test_who_waits_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "WAIT", 0.3)
    assert "more than 0.3 s in take" in told(bad_inputs.Kind("made", 1, lambda _: None, _sleeps), 1)


def _sleeps(_given: Any, _told: Any) -> None:
    def take() -> None:
        time.sleep(5)

    take()


def test_a_function_is_known_by_what_it_has_at_hand_however_deep_that_is_or_where_it_holds_itself() -> None:
    def made_with(given: Any) -> str | None:
        def work(batch: Any) -> Any:
            return given

        return spec.work_hash(due.NewRows("source", "id"), work)

    cyclic: list[Any] = [1]
    cyclic += [cyclic, cyclic]
    deep = bad_inputs_at_work._deep(100_000, lambda x: [x])
    record = dg.MetadataValue.text("a")  # a tuple that cannot be gone through
    different = [deep, cyclic, record, [record], [1], [2], {"a": [1]}]
    assert len({made_with(each) for each in different}) == len(different)


def test_rows_that_the_driver_refuses_in_its_own_words_are_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with bad_inputs_at_work.world(url) as made:
        known = {kind.name: kind for kind in bad_inputs_at_work.with_database(made)}["rows that are written"]
        given = ("insert", "kept", [{"j": {"a": object()}}])
        kind = bad_inputs.Kind("made", 1, lambda _: given, known.take, known.foreign)
        assert told(kind, 1) == ""

        def as_it_is(*_: Any) -> Any:
            return bad_inputs.contextlib.nullcontext()

        monkeypatch.setattr(payload, "unsendable", as_it_is)
        assert "TypeError in" in told(kind, 1)
