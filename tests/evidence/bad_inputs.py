"""Inputs that are nearly good, of every kind that somebody can give, and what is right to become of each.

A kind makes an input (`make`) and gives it to the product (`take`), which either refuses it with an error of ours, or
does right by it: `take` checks what can be checked, and raises `WrongError` where that does not hold. Wherever a secret
may stand stands `CANARY`, which nothing that anybody can read may show.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
import random
import re
import socket
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from io import StringIO
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID
from zoneinfo import ZoneInfo

import gaffer_dagster as gd
from gaffer_dagster.domain.alert import Alerts
from gaffer_dagster.domain.due import due_from_json
from gaffer_dagster.domain.duration import as_duration, show_duration
from gaffer_dagster.domain.lint import lint
from gaffer_dagster.domain.notice import test_message
from gaffer_dagster.domain.spec import schedule_from_json
from gaffer_dagster.domain.words import words
from gaffer_dagster.engine import receivers
from gaffer_dagster.engine.log import wrap
from gaffer_dagster.store import db

CANARY = "Kanarienvogel7q"
CASES = Path(__file__).parents[1] / "unit" / "cases"
UTC = timezone.utc


class WrongError(AssertionError):
    """The input was taken, and what became of it is not right."""


@dataclass
class Told:
    """What was said by other ways than an error."""

    texts: list[str] = field(default_factory=list)

    def __call__(self, *texts: object) -> None:
        self.texts += map(str, texts)


@dataclass(frozen=True)
class Kind:
    """`share`: of a thousand inputs. `errors`: what it may be refused with, and `foreign`: those that are not ours, and
    whose text is not ours to judge."""

    name: str
    share: int
    make: Callable[[random.Random], Any]
    take: Callable[[Any, Told], str | None]
    foreign: tuple[type[BaseException], ...] = ()

    def refused(self, error: Exception) -> bool:
        """Whether the error is one that such an input may end in. Raises `WrongError` where it is ours and unclear."""
        if isinstance(error, gd.GafferError):
            clear(str(error))
            return True
        return isinstance(error, self.foreign)


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

NASTY = (
    *("", " ", "\0", "\n", "\r\n", "\t", "\x1b[31m", "\x7f", "\u202e", "\ud800", "\udcff", "\u00a0", "\ufeff",
    "\u2028"),
    *("é", "ß", "İ", "ı", "١", "０", "\u212a", "а", "😀", "e\u0301", "%", "%s", "%%", "%(a)s", "%zz", "'", '"', "''",
    "\\"),
    *("`", "$$", "$(id)", "; --", "/*", "*/", "{}", "{0}", "{{x}}", "{% x %}", "[bold]", "<b>", "&", "#", "?", "@",
    ":"),
    *("/", "//", "../", "..", ".", "-", "--", "_", ",", "=", "~", "!", "(", ")", "*", "+", "|", "^", "0", "-1", "1e9"),
    *("9" * 30, "a" * 300, "null", "None", "NaN", "infinity", "true", "\u0130" * 3),
)  # fmt: skip


def mutated(text: str, chance: random.Random, most: int = 3) -> str:
    """`text` with some changes, each of which somebody, or something, may make."""
    for _ in range(chance.choice((0, 1, 1, 2, most)) if most > 1 else 1):
        at, end = sorted(chance.randint(0, len(text)) for _ in range(2))
        end = min(end, at + 6)
        match chance.randrange(9):
            case 0:
                text = text[:at] + text[end:]
            case 1 | 2:
                text = text[:at] + chance.choice(NASTY) + text[at:]
            case 3:
                text = text[:at] + chance.choice(NASTY) + text[end:]
            case 4:
                text = text[:at] + text[at:end] * chance.choice((2, 2, 3, 40)) + text[end:]
            case 5:
                text = text[:at] + text[at:end].swapcase() + text[end:]
            case 6:
                text = text[:at] + text[at:end][::-1] + text[end:]
            case 7:
                text = (
                    text[:at] if chance.random() < 0.3 else text[:at] + chr(chance.randint(1, 0x2FF)) + text[at + 1 :]
                )
            case _:
                text = chance.choice((text.upper(), text.title(), f" {text}", f"{text}\n", f"'{text}'", text.strip()))
    return text


class _Text(str):
    __slots__ = ()


class _Number(int):
    pass


class _Word(Enum):
    ONE = "one"


_WITHOUT_ZONE = (datetime.min, datetime.max, datetime(2024, 1, 1))  # noqa: DTZ001, DTZ901 — as some give them


def odd(chance: random.Random) -> Any:
    """A value of a type, or size, that nobody thought of."""
    deep: Any = []
    for _ in range(chance.choice((1, 3, 50))):
        deep = [deep] if chance.random() < 0.5 else {"a": deep}
    return chance.choice(
        [
            *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**40, -(10**40), 0.0, 0.5, 1.0, -1.5, 1e308),
            *(math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("1.5"), Fraction(1, 3), 1j),
            *("", " ", "a", "\0", "a\0b", "\ud800", "é", "%", "x" * 10_000, "1", "None", b"", b"a\xff",
            bytearray(b"a")),
            *([], [1], ["a", None], (), ("a",), {}, {"a": 1}, {1: 2}, {None: None}, set(), {"a"}, frozenset(), deep),
            *(object(), object, len, _Word.ONE, _Text("0 6 * * *"), _Number(3), range(3), iter("ab"), ...),
            *(*_WITHOUT_ZONE, datetime(2024, 1, 1, tzinfo=UTC)),
            *(datetime.max.replace(tzinfo=timezone(-timedelta(hours=23))), datetime.min.replace(tzinfo=timezone.max)),
            *(date.min, date.max, date(2024, 2, 29), timedelta.min, timedelta.max, timedelta(), -timedelta(1)),
            *(timedelta(microseconds=1), timedelta(days=400), ZoneInfo("UTC"), UTC, UUID(int=0), re.compile("a")),
        ]
    )  # fmt: skip


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

_CRONS = ["H H * * *", "@daily", "H/15 * * * *", "0 0 29 2 *", "0 0 L * *", "0 9 * * 1#2", "0 0 1-7/2 */2 L5",
"5 0-22/3 * * *",
          "0 22-2 * * MON-FRI", "H(0-29)/10 * * * *", "1,2,3 4,5 6,7 8,9 *", "0 0 31 1,3 0,6"]  # fmt: skip
_ZONES = ["UTC", "America/New_York", "Europe/Dublin", "Africa/Casablanca", "Australia/Lord_Howe", "Pacific/Apia",
"Asia/Tehran",
          "America/Sao_Paulo", "Antarctica/Troll", "Asia/Kathmandu", "Africa/Monrovia", "Europe/Berlin", "GMT",
          "Zulu"]  # fmt: skip
with (CASES / "bad_schedules.csv").open() as _file:
    _rows = list(csv.DictReader(_file))
    _CRONS += [row["cron"] for row in _rows]
    _ZONES += [row["timezone"] for row in _rows]
with (CASES / "ticks.csv").open() as _file:
    _rows = list(csv.DictReader(_file))
    _CRONS += [row["cron"] for row in _rows]
    _ZONES += [row["zone"] for row in _rows]

_PARTS = ("*", "*/5", "*/7", "0", "1", "5-9", "9-5", "1-1", "H", "H/3", "h(1-9)", "L", "L5", "5L", "1#2", "6#5", "MON",
"jan", "31", "29",
          "30,31", "7", "0-7", "24", "60", "?", "R", "1/2", "-1", "1-", "*-5", "1,,2", "W", "*/0", "*/99999", "00",
          "007")  # fmt: skip


def _cron(chance: random.Random) -> tuple[Any, str, dict[str, str], str, datetime]:
    if chance.random() < 0.35:
        text: Any = " ".join(chance.choice(_PARTS) for _ in range(chance.choice((5, 5, 5, 5, 5, 4, 6, 7))))
    else:
        text = mutated(chance.choice(_CRONS), chance)
    if chance.random() < 0.1:
        text = [text, mutated(chance.choice(_CRONS), chance, 1)][: chance.randint(0, 2)]
    zone = chance.choice(_ZONES[:14]) if chance.random() < 0.7 else mutated(chance.choice(_ZONES), chance)
    options = {
        name: chance.choice((*choices, *NASTY)) if chance.random() < 0.05 else chance.choice(choices)
        for name, choices in (("missing_hour", ("end", "skip")), ("repeated_hour", ("second", "first")))
        if chance.random() < 0.5
    }
    after = datetime(1969, 1, 1, tzinfo=UTC) + timedelta(days=chance.choice((0, 365, 16_000, 20_000, 1_900_000))) * (
        chance.random() + 0.5
    )
    odd_after = (
        *_WITHOUT_ZONE,
        datetime.max.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=timezone.max),
    )
    return (
        text,
        zone,
        options,
        chance.choice(("", "a", "b/c")),
        chance.choice(odd_after) if chance.random() < 0.05 else after,
    )


def _take_cron(given: tuple[Any, str, dict[str, Any], str, datetime], told: Told) -> None:
    text, zone, options, job, after = given
    schedule = gd.Schedule(text, zone, **options)
    told(*schedule.warnings, repr(schedule), schedule.canonical)
    schedule = schedule.resolved(job)
    if gd.Schedule(schedule.cron, zone, **options) != schedule:
        raise WrongError("its canonical form means something else")
    told(words(schedule))
    ticks: list[datetime] = []
    at = after
    for _ in range(4):
        at = schedule.next(at)
        ticks.append(at)
    if any(not earlier < later for earlier, later in pairwise([after.replace(tzinfo=after.tzinfo or UTC), *ticks])):
        raise WrongError(f"its ticks do not rise: {ticks}")
    # Monrovia's clock was 44 minutes and 30 seconds behind until 1972.
    if any(tick.utcoffset() != timedelta() or tick.microsecond or (tick.second and tick.year > 1972) for tick in ticks):
        raise WrongError(f"its ticks are no whole minutes in UTC: {ticks}")
    if ticks != list(islice(schedule.ticks(after, ticks[-1]), 5)) or schedule.count(after, ticks[-1]) != 4:
        raise WrongError("ticks, count and next do not agree")
    if schedule.latest(ticks[-1]) != ticks[-1] or schedule.latest(ticks[-1] - timedelta(microseconds=1)) != ticks[-2]:
        raise WrongError("latest and next do not agree")
    if not timedelta() < schedule.shortest_interval() <= schedule.longest_interval():
        raise WrongError("its intervals are none")
    if ticks[0].minute % 7 == 0:
        said = lint(schedule, ticks[0], job=job or None, timeout=timedelta(minutes=5))
        told(said.words, said.fires_a_day, *said.warnings, *said.notes, *said.clock)
        told(*(each.note for each in schedule.preview(after, 5)))


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_NAMES = ["a", "0", "carrier_delay", "reports/daily.v2-x", "a" * 128, "raw/flights", "new", "a.b", "x-y_z/1"]


def _take_name(name: str, told: Told) -> None:
    spec = gd.JobSpec(name, gd.NewRows("t", "id"), gd.Schedule("H * * * *"))
    if len(name) > 128 or set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789_./-"):
        raise WrongError("it was taken")
    told(spec.hash)
    storable(spec.as_json())


def storable(value: Any) -> None:
    """Whether `jsonb` can keep it, and whatever reads it gets it back."""
    text = json.dumps(value, allow_nan=False)
    if "\\u0000" in text or re.search(r"\\ud[89a-f]", re.sub(r"\\ud[89ab]..\\ud[c-f]..", "", text)):
        raise WrongError(f"the database cannot keep {text[:200]}")


# ── where the database is ────────────────────────────────────────────────────────────────────────────────────────────

_PASSWORDS = [CANARY, f"p@{CANARY}", f"{CANARY}@p", f"p/{CANARY}", f"p#{CANARY}", f"p?{CANARY}", f"p?a={CANARY}",
f"p?sslmode={CANARY}",
              f"p:{CANARY}", f"p%{CANARY}", f"%zz{CANARY}", f"%00{CANARY}", f"%ff{CANARY}", f"p {CANARY}",
              f"é{CANARY}", f"[{CANARY}",
              f"{CANARY}]", f"p\0{CANARY}", f"'{CANARY}", f"\\{CANARY}", f'"{CANARY}"', f"p&a={CANARY}", f"p={CANARY}",
              f"p;{CANARY}",
              f"p%40{CANARY}", f"p,{CANARY}", f"\ud800{CANARY}", f"$({CANARY})", f"p\n{CANARY}", f"`{CANARY}`",
              f"1{CANARY}"]  # fmt: skip
_DSNS = [
    *("postgresql://me:{p}@127.0.0.1:1/db", "postgres://me:{p}@127.0.0.1:1/db",
    "postgresql+psycopg2://me:{p}@127.0.0.1:1/db"),
    *("postgresql+psycopg://me:{p}@127.0.0.1:1/db", "POSTGRESQL://me:{p}@127.0.0.1:1/db",
    "postgresql:/me:{p}@127.0.0.1:1/db"),
    *("postgresql//me:{p}@127.0.0.1:1/db", "postgresql:me:{p}@127.0.0.1:1/db", "me:{p}@127.0.0.1:1/db",
    "jdbc:postgresql://me:{p}@h/db"),
    *("postgresql://me:{p}127.0.0.1:1/db", "postgresql://127.0.0.1:{p}/db", "postgresql://me:{p}@[::1]:1/db",
    "postgresql://me:{p}@/db"),
    *("postgresql://me:{p}@[::1:1/db", "postgresql://me:{p}@127.0.0.1:1,127.0.0.1:2/db",
    "postgresql://me:{p}@127.0.0.1:99999/db"),
    *("postgresql://me:{p}@127.0.0.1:1/db?sslmode=no", "postgresql://me:{p}@127.0.0.1:1/db?connect_timeout=x",
    "mysql://me:{p}@h/db"),
    *("postgresql://me:{p}@127.0.0.1:1/db?options=-c%20a=b",
    "postgresql://me:{p}@127.0.0.1:1/db?target_session_attrs=x"),
    *("postgresql://me:{p}@127.0.0.1:1/db?sslrootcert=/none&sslmode=verify-full",
    "postgresql://me:{p}@127.0.0.1:1/db?hostaddr=x"),
    *("postgresql://me:{p}@127.0.0.1:1/db?channel_binding=x", "postgresql://me:{p}@127.0.0.1:1/db?require_auth=x",
    "sqlite:///{p}"),
    *("postgresql://me:{p}@127.0.0.1:1/db?a=b", "postgresql://me@127.0.0.1:1/db?password={p}",
    "postgresql://127.0.0.1:1/db?passwd={p}"),
    *("postgresql://me@127.0.0.1:1/db?sslpassword={p}", "postgresql://127.0.0.1:1/db?user=me&password={p}&sslmode",
    "service=x password={p}"),
    *("host=127.0.0.1 port=1 user=me password={p}", "host=127.0.0.1 port=1 password = {p} dbname=db",
    "host=127.0.0.1 port=1 password '{p}'"),
    *("host=127.0.0.1 port=1 password='{p}'", "host=127.0.0.1 passwd={p}",
    "host=127.0.0.1 port=1 password={p} sslmode=no", "password={p}"),
    *("host=127.0.0.1 port={p}", "host=127.0.0.1;port=1;password={p}", "dbname=postgresql://me:{p}@127.0.0.1:1/db",
    "host=/none password={p}"),
    *("dbname='postgresql://me:{p}@127.0.0.1:1/db' connect_timeout=1", "host=me:{p}@127.0.0.1 port=1",
    "user=me:{p}@127.0.0.1 port=1 host=/none"),
    *("host=127.0.0.1 port=1 passfile=/none/{p}", "postgresql://127.0.0.1:1/db?passfile={p}",
    "postgresql://me:{p}@a b:1/db", "{p}"),
    *("GAFFER_DATABASE_URL=postgresql://me:{p}@127.0.0.1:1/db", "export URL=postgresql://me:{p}@127.0.0.1:1/db",
    "psql postgresql://me:{p}@h/db"),
    *("'postgresql://me:{p}@127.0.0.1:1/db'", '"postgresql://me:{p}@127.0.0.1:1/db"',
    "postgresql://me:{p}@127.0.0.1:1/db\npostgresql://b:{p}@h/c"),
    *("postgresql://me:{p}@@127.0.0.1:1/db", "postgresql://me:{p}@127.0.0.1:1:2/db",
    "postgresql://:{p}@127.0.0.1:1/db", "127.0.0.1,1,me,{p},db"),
    *("postgresql:\\\\me:{p}@127.0.0.1:1\\db", "https://me:{p}@127.0.0.1/db", "local:{p}",
    "host=127.0.0.1 port=1 scram_client_key={p}"),
    *("host=127.0.0.1 port=1 scram_server_key={p} password=x", "postgresql://me:{p}@%7f:1/db",
    "postgresql://me:{p}@127.0.0.1:1/db#f"),
    *('{{"host": "127.0.0.1", "password": "{p}"}}', "postgresql://me:{p}@127.0.0.1:1//db",
    "postgresql://me:{p}@" + "h" * 70 + ".invalid/db"),
    *("postgresql://me:{p}@..:1/db", "postgresql://me:{p}@127.0.0.1:1/{p}@db", "postgresql://me:{p}@no.invalid:1/db",
    "postgresql:///?password={p}"),
]  # fmt: skip


def _dsn(chance: random.Random) -> str:
    text = chance.choice(_DSNS).format(p=chance.choice(_PASSWORDS))
    return mutated(text, chance, 2) if chance.random() < 0.5 else text


def _is_meant(text: str) -> bool:
    """What was to be the password is a name, as libpq reads it: nobody can tell that it is none."""
    try:
        parts = db.parse_url(text)
    except gd.GafferError:
        return False
    return any(
        CANARY.lower() in str(parts.get(name, "")).lower() and not re.search(signs, str(parts[name]))
        for name, signs in (
            ("user", ":"),
            ("service", " "),
            ("sslmode", " "),  # what libpq itself repeats
            ("host", "[;=]|^[^/].*[@:/ ]"),
            ("hostaddr", "[@:/ ]"),
            ("dbname", "[@:;= ]|//"),
        )
    )


def _take_dsn(text: str, told: Told) -> str | None:
    if _is_meant(text):
        return "names the secret as something else"
    parts = db.parse_url(text)
    told(db.describe(text))
    words, secrets = db.for_psql(text)
    told(words)
    if str(parts.get("password", "")) and "PGPASSWORD" not in secrets:
        raise WrongError("psql would not get the password")
    if any(word in str(parts.get("host", "127")) for word in ("127", "none", "invalid", ":", "localhost")):
        with guarded_network():
            db.connect(text, application_name="fuzz", patience=2).close()
        raise WrongError("it was connected to")
    return None


@contextlib.contextmanager
def guarded_network() -> Generator[None]:
    """No name is looked up, and nothing but this machine is reached."""
    real = socket.getaddrinfo

    def look_up(host: Any, *args: Any, **options: Any) -> Any:
        said = host.decode() if isinstance(host, bytes) else host
        if said is not None and not re.fullmatch(r"127\.[\d.]+|::1|localhost", said):
            said.encode("idna")  # as the real one does first
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *args, **options)

    with mock.patch("socket.getaddrinfo", look_up):
        yield


_ERRORS = [
    "cannot reach {}",
    "{} refused",
    "OperationalError({!r})",
    "connect({})",
    "url={}",
    '{{"url": "{}"}}',
    "{}\nand {}",
]


def _said(chance: random.Random) -> str:
    """An error that a user's function raises, with a URL that a driver would take."""
    url = chance.choice(_DSNS[:5] + [each for each in _DSNS if each.startswith("host=127.0.0.1 port=1 user=me")])
    password = chance.choice([each for each in _PASSWORDS if not re.search("[ \n\0?#'/]", each)])
    text = url.format(p=password)
    return chance.choice(_ERRORS).format(text, text)


def _take_said(text: str, told: Told) -> None:
    told(db.primary_message(RuntimeError(text)), db.redact(text))


# ── what a job is ────────────────────────────────────────────────────────────────────────────────────────────────────

_DURATIONS = [
    "20m",
    "90s",
    "1h30m",
    "2d",
    "1.5h",
    "500ms",
    "0s",
    "1d1d",
    "10 m",
    "5",
    "-5m",
    "1h,5m",
    "PT5M",
    "9" * 400 + "h",
    "0.000001ms",
]
_DATES = [
    "2024-01-01",
    "2024-01-01T00:00:00+00:00",
    "2024-03-10T02:30",
    "0001-01-01",
    "9999-12-31",
    "2024-02-30",
    "24-1-1",
]


def _bool(chance: random.Random) -> bool:
    return chance.random() < 0.5


_CLASSES: Mapping[type, Mapping[str, Sequence[Any]]] = {
    gd.Schedule: {"cron": _CRONS, "timezone": _ZONES, "missing_hour": ["end", "skip"], "repeated_hour": ["first",
    "second"]},
    gd.NewRows: {"table": ["flights", "public.t", '"T x"'], "key": ["id", "Key"], "settle": ["snapshot", *_DURATIONS],
                 "cursor": [None, "at", ["at"], ["a", "b"]], "where": [None, "id > 1", "a %% 2 = 0"],
                 "start": ["beginning"]},
    gd.PendingRows: {"table": ["queue"], "key": ["id"], "pending": ["done_at is null"], "done": ["done_at = now()"],
                     "attempts": [1, 5], "parallel": [1, 4, 64, 65], "backoff": _DURATIONS},
    gd.EachInterval: {"cron": [None, *_CRONS], "settle": _DURATIONS, "start": [None, *_DATES], "until": [None,
    *_DATES]},
    gd.Elapsed: {"slice": [None, *_DURATIONS], "settle": _DURATIONS, "start": [None, *_DATES]},
    gd.Bounds: {"batch_rows": [None, 1, 1000], "batches": [1, 100], "timeout": [None, *_DURATIONS],
    "batch_timeout": [None, *_DURATIONS]},
    gd.Alerts: {"grace": [None, *_DURATIONS], "failures": [1, 3], "capped": [10], "backlog": [None, *_DURATIONS],
    "stalled": _DURATIONS,
                "takeovers": [3], "pause": _DURATIONS, "remind": _DURATIONS, "receivers": [None, ["oncall"], "oncall",
                ["a", "b_1"]],
                "heartbeat": [None, "PING_URL"]},
}  # fmt: skip
_REQUIRED = {
    gd.Schedule: ("cron",),
    gd.NewRows: ("table", "key"),
    gd.PendingRows: ("table", "key", "pending", "done"),
}
# Where people put a URL that belongs into a variable.
_ASTRAY = [f"https://hc-ping.com/{CANARY}", f"hc-ping.com/{CANARY}", f"mailto:me:{CANARY}@example.com",
f"slack://a/{CANARY}",
           f"postgresql://me:{CANARY}@db/x", f"host=db password={CANARY}", f"{CANARY[:8]}-{CANARY}",
           f"https:/hooks/{CANARY}"]  # fmt: skip
_SECRET_FIELDS = ("receivers", "heartbeat")


@dataclass(frozen=True)
class Given:
    """A class, or function, and what it is given. `misspelt`: one of the names is unknown."""

    what: Any
    options: Mapping[str, Any]
    misspelt: bool = False

    def __repr__(self) -> str:
        return f"{self.what.__name__}(**{dict(self.options)!r})"


def _options(chance: random.Random, what: type, faults: int) -> Given:
    known = _CLASSES[what]
    chosen = {name: values[0] for name, values in known.items() if name in _REQUIRED.get(what, ()) or _bool(chance)}
    for _ in range(faults):
        name = chance.choice(list(known))
        values = known[name]
        match chance.randrange(4):
            case 0:
                chosen[name] = chance.choice(values)
            case 1:
                texts = [value for value in values if isinstance(value, str)] or [""]
                chosen[name] = mutated(chance.choice(texts), chance)
            case 2 if name in _SECRET_FIELDS:
                astray = mutated(chance.choice(_ASTRAY), chance, 1)
                chosen[name] = chance.choice(([astray], astray, [astray, "oncall"])) if name == "receivers" else astray
            case _:
                chosen[name] = odd(chance)
    if chance.random() < 0.02:
        name = chance.choice(list(known))
        return Given(what, {**chosen, mutated(name, chance, 1): chosen.get(name, 1)}, misspelt=True)
    return Given(what, chosen)


def _config(chance: random.Random) -> list[Given]:
    """The parts of a job; each but one, most times, as it should be."""
    bad = chance.randrange(5)
    due = chance.choice((gd.NewRows, gd.PendingRows, gd.EachInterval, gd.Elapsed))
    kinds: Sequence[type] = (gd.Schedule, due, gd.Bounds, gd.Alerts)
    parts = [
        _options(chance, kind, chance.choice((1, 1, 2)) if number == bad else 0) for number, kind in enumerate(kinds)
    ]
    spec = {"name": chance.choice(_NAMES)}
    if bad == 4 or chance.random() < 0.1:
        name = chance.choice(("name", "exclusion", "max_late", "protect", "due", "schedule", "bounds", "alerts"))
        good = {"exclusion": "advisory", "max_late": "1h", "protect": ["t"]}.get(name, "a")
        spec[name] = odd(chance) if _bool(chance) or not isinstance(good, str) else mutated(good, chance)
    return [*parts, Given(gd.JobSpec, spec)]


def _make_all(given: Sequence[Given]) -> Any:
    *parts, spec = given
    made = {name: _made(part) for name, part in zip(("schedule", "due", "bounds", "alerts"), parts, strict=True)}
    return _made(Given(spec.what, {**made, **spec.options}, spec.misspelt))


class MisspeltError(Exception):
    """Python's own TypeError over an option that there is not."""


def _made(given: Given) -> Any:
    try:
        return given.what(**given.options)
    except TypeError as error:
        if given.misspelt and "keyword argument" in str(error):
            raise MisspeltError(str(error)) from None
        raise


def _take_config(given: Sequence[Given], told: Told) -> None:
    spec: gd.JobSpec = _make_all(given)
    stored = json.loads(json.dumps(spec.as_json()))
    told(stored, repr(spec))
    storable(stored)
    if schedule_from_json(stored["schedule"]) != spec.schedule or Alerts.from_json(stored["alerts"]) != spec.alerts:
        raise WrongError("what is stored of it means something else")
    due = due_from_json(stored["due"])
    if due is not None and due != spec.due and due.as_json() != spec.due.as_json():
        raise WrongError("what is stored of what is due means something else")
    now = datetime(2024, 3, 10, 6, tzinfo=UTC)
    if isinstance(spec.due, (gd.EachInterval, gd.Elapsed)):
        first = spec.intervals.first(now)
        window = spec.intervals.after(first, now + timedelta(days=400))
        if spec.intervals.left(first, now + timedelta(days=40)) < 0 or (window and not window.since < window.until):
            raise WrongError("its windows are none")
    told(spec.alerts.grace_for(spec.schedule), spec.hash)


def _duration(chance: random.Random) -> Any:
    return mutated(chance.choice(_DURATIONS), chance) if chance.random() < 0.8 else odd(chance)


def _take_duration(value: Any, told: Told) -> None:
    duration = as_duration(value, "--every")
    shown = show_duration(duration)
    told(shown)
    if duration >= timedelta(milliseconds=1) and abs(as_duration(shown, "x") - duration) > timedelta(milliseconds=1):
        raise WrongError(f"{shown} is another duration")


# ── receivers ────────────────────────────────────────────────────────────────────────────────────────────────────────

_URLS = [f"https://hooks.invalid/services/T0/B0/{CANARY}", f"https://me:{CANARY}@hooks.invalid/x",
f"http://127.0.0.1:1/{CANARY}",
         f"https://127.0.0.1:1/x?token={CANARY}", f"https://hooks.invalid:{CANARY}/x", f"https:/hooks.invalid/{CANARY}",
         f"htps://hooks.invalid/{CANARY}", f"//hooks.invalid/{CANARY}", f"hooks.invalid/{CANARY}", CANARY,
         f"https://{CANARY}@127.0.0.1:1",
         f"https://[::1]:1/{CANARY}", f"https://[::1/{CANARY}", f"https://127.0.0.1:0/{CANARY}",
         f"https://127.0.0.1:1/#{CANARY}",
         f"https://127.0.0.1:99999/{CANARY}", f"https://{'h' * 70}.invalid/{CANARY}", f"https://..invalid/{CANARY}",
         f"http://169.254.169.254/{CANARY}", f"https://2130706433:1/{CANARY}", f"file:///{CANARY}",
         f"gopher://x/{CANARY}",
         f"HTTPS://127.0.0.1:1/{CANARY}", f" https://127.0.0.1:1/{CANARY}\n", f"https://127.0.0.1:1/ {CANARY}",
         f"https://é.invalid/{CANARY}"]  # fmt: skip
_APPRISE = [f"mailto://me:{CANARY}@127.0.0.1:1?to=a@b.invalid", f"mailtos://me:{CANARY}@no.invalid",
f"slack://T1JJ3T3L2/A1BRTD4JD/{CANARY}",
            f"slack://xoxb-1234-1234-4ddbc191d40ee098cbaae6f3523ada2d/{CANARY}",
            f"tgram://123456789:{CANARY}abcdefghijklmnop/123",
            f"json://me:{CANARY}@127.0.0.1:1/{CANARY}", f"jsons://127.0.0.1:1/?token={CANARY}",
            f"discord://1234567890/{CANARY}{CANARY}",
            f"xml://me:{CANARY}@127.0.0.1:1", f"ntfy://{CANARY}@127.0.0.1:1/topic", f"gotify://127.0.0.1:1/{CANARY}",
            f"pover://u@{CANARY}",
            f"msteams://a@b/{CANARY}/c/", f"pagerduty://{CANARY}@key", f"unknown://{CANARY}",
            f"mailto:me:{CANARY}@gmail.com",
            f"form://127.0.0.1:1/?-X-Token={CANARY}", f"mmost://127.0.0.1:1/{CANARY}",
            f"matrix://me:{CANARY}@127.0.0.1:1/#room",
            f"twilio://AC{CANARY}:{CANARY}@12223334444", f"sendgrid://{CANARY}:a@b.invalid/c@d.invalid",
            f"apprise://127.0.0.1:1/{CANARY}"]  # fmt: skip


def _receivers(chance: random.Random, urls: Sequence[str] = tuple(_URLS)) -> dict[str, str]:
    """The environment of who looks."""
    name = f"GAFFER_RECEIVER_{chance.choice(('OPS', 'A', 'LOG', 'ops', 'Ö', '1', 'A-B', ''))}"
    url = chance.choice(urls)
    given = {name: mutated(url, chance, 2) if chance.random() < 0.6 else url}
    for suffix, values in (
        ("_SEVERITY", ("error", "warning", "fatal", *urls)),
        ("_PRIVATE", ("1", "1", "1", "0", "yes", *urls[:3])),
    ):
        if chance.random() < 0.4:
            given[name + suffix] = (
                chance.choice(values) if chance.random() < 0.8 else mutated(chance.choice(values), chance)
            )
    if chance.random() < 0.05:
        del given[name]
    # An environment holds no others.
    return {name: value.replace("\0", "") for name, value in given.items()}


LOGGER = logging.getLogger("gaffer")


def _take_receivers(environment: dict[str, str], told: Told) -> str | None:
    found = receivers.receivers_from(environment, wrap(LOGGER))
    came: set[str] = set()
    with guarded_network(), mock.patch("subprocess.run", _in_this_process):
        for each in found:
            told(repr(each))
            try:
                each.send(test_message())
                came.add(type(each).__name__)
            except gd.errors.NotDeliveredError as error:
                told(error)
                came.add(f"not delivered by {type(each).__name__}")
                # What may be thrown further keeps what it was made of.
                told(repr(error.__cause__))
    return ", ".join(sorted(came - {"ToLog"})) or "none"


def _in_this_process(_words: Any, *, input: bytes, **_options: Any) -> subprocess.CompletedProcess[bytes]:  # noqa: A002
    """What `_CHILD` does, without the two seconds that it takes to start."""
    given = json.loads(input)
    said = StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(StringIO()), _nobody_listens():
        try:
            code = receivers.notify(given["url"], given["message"])
        except Exception:  # whose traceback goes nowhere
            code = 1
    logging.getLogger("apprise").handlers.clear()
    return subprocess.CompletedProcess([], code, said.getvalue().encode(errors="replace"))


@contextlib.contextmanager
def _nobody_listens() -> Generator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("Connection refused")

    with mock.patch("socket.socket.connect", refuse), mock.patch("time.sleep"):
        yield


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# What is asked for begins a sentence or a part of one; or what can be chosen is told.
_CURE = re.compile(
    r"(?:^|\(|[;:,.] (?:for [\w ]+ )?|\b(?:and|or|then|to) )"
    r"(?:use|write|give|put|leave|set|let|make|mend|shorten|take|name|install|see|run|check|type|ask|launch|add|choose|"
    r"wait|say|look|grant|qualify|create|unset)\b|\b(?:must be|has to|have to|use|the form is)\b"
    r"|[;,] (?:the next is|did you mean|perhaps .+ is meant|it has|there is|of such only) "
)


def clear(message: str) -> str:
    """An error's text. Raises `WrongError` where that says nothing."""
    if len(message) < 15 or not _CURE.search(message):
        raise WrongError(f"the error says no cure: {message!r}")
    return message


def pure() -> Iterator[Kind]:
    """The kinds that need no database."""
    yield Kind("cron and zone", 270, _cron, _take_cron)
    yield Kind("job's name", 80, lambda chance: mutated(chance.choice(_NAMES), chance), _take_name)
    yield Kind("duration", 40, _duration, _take_duration)
    yield Kind("database URL", 150, _dsn, _take_dsn)
    yield Kind("URL in an error", 40, _said, _take_said)
    yield Kind("configuration", 200, _config, _take_config, (MisspeltError,))
    yield Kind("webhook", 80, _receivers, _take_receivers)
    yield Kind("receiver of Apprise", 15, lambda chance: _receivers(chance, _APPRISE), _take_receivers)
