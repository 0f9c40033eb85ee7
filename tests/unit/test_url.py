"""Database URLs: what is accepted, and that no error repeats a password."""

from __future__ import annotations

import traceback

import pytest

from gaffer_dagster.errors import BadInputError, DatabaseUnavailableError, GafferError
from gaffer_dagster.store import db

# A port at which nobody listens.
NOWHERE = "127.0.0.1:1"
FORMS = [
    f"postgresql://u:{{}}@{NOWHERE}/x",
    f"postgres://u:{{}}@{NOWHERE}/x",
    f"postgresql+psycopg2://u:{{}}@{NOWHERE}/x",
    f"postgresql://u:{{}}@{NOWHERE}/x?application_name=a@b",
    f"postgresql://u:{{}}@{NOWHERE}",
    f"postgresql://{NOWHERE}/x?user=u&password={{}}",
    f"dbname=postgresql://u:{{}}@{NOWHERE}/x",
    "host=u:{}@127.0.0.1 port=1",
    "host=/nowhere user=u:{}@127.0.0.1",
    "host=127.0.0.1;port=1;password={}",
    "host=127.0.0.1 port=1 user=u password={}",
    "host=127.0.0.1 port=1 user=u password='{}",
    # mistyped
    f"postgres//u:{{}}@{NOWHERE}/x",
    f"postgresql:/u:{{}}@{NOWHERE}/x",
    f"postgresql+asyncpg://u:{{}}@{NOWHERE}/x",
    f"mysql://u:{{}}@{NOWHERE}/x",
    f"u:{{}}@{NOWHERE}/x",
    f"postgresql://u:{{}}@{NOWHERE}/x?connect_timeout=soon",
    f"postgresql://u:{{}}@{NOWHERE}/x?sslmode=perhaps",
    f"postgresql://u:{{}}@{NOWHERE}/x?pasword=y",
    f"postgresql://u:{{}}@{NOWHERE}/x?options=-cstatement_timeout%3D1",
    "postgresql://u:{}@127.0.0.1:port/x",
    "postgresql://u:{}@127.0.0.1:99999/x",
    "postgresql://u:{}@" + 70 * "h" + "/x",
    "postgresql://u:{}@a..b/x",
    "postgresql://u:{}@/tmp/nowhere/x",
]  # fmt: skip
PARTS = ("s3cr3t", "w0rdy")
BETWEEN = ["", *"@/:#?% &=\\'\"[],;é\n\t", "%zz", "%00", "%", "@@", "//", "\udc80", "\0"]


@pytest.mark.parametrize("form", FORMS)
def test_no_error_repeats_a_password_whatever_is_in_it(form: str) -> None:
    for between in BETWEEN:
        url = form.format(between.join(PARTS))
        for attempt in (lambda url=url: db.connect(url, application_name="test"), lambda url=url: db.describe(url)):
            try:
                told = attempt()
            except GafferError as error:
                told = "".join(traceback.format_exception(error))
            assert not any(part in str(told) for part in PARTS), f"{between!r} in {form}"


def test_a_url_without_the_at_sign_is_not_shown_either() -> None:
    with pytest.raises(BadInputError, match="not shown"):
        db.connect("postgresql://u:s3cr3tlocalhost:5432/x", application_name="test")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p%40%2Fw@h:5433/x",
        "postgres://u:p%40%2Fw@h:5433/x",
        "postgresql+psycopg2://u:p%40%2Fw@h:5433/x",
        "postgresql+psycopg://u:p%40%2Fw@h:5433/x",
        "postgres+psycopg://u:p%40%2Fw@h:5433/x",
        " postgresql://u:p%40%2Fw@h:5433/x\n",
        "host=h port=5433 user=u password=p@/w dbname=x",
        "postgresql:///x?host=h&port=5433&user=u&password=p%40%2Fw",
    ],
)
def test_urls_of_libpq_and_of_sqlalchemy_are_read_alike(url: str) -> None:
    assert db.parse_url(url) == {"host": "h", "port": "5433", "user": "u", "password": "p@/w", "dbname": "x"}
    assert db.describe(url) == "u@h:5433/x"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@[::1]:5433/x",
        "postgresql://u@h1:1,h2/x",
        "postgresql://u@h1,h2:2/x",
        "postgresql:///x?host=/var/run/postgresql&user=me@home",
        "postgresql://me%40home@h/a%40b",
        "dbname=a@b",
        "postgresql://",
    ],
)
def test_what_libpq_understands_is_not_refused(url: str) -> None:
    db.parse_url(url)


@pytest.mark.parametrize("url", ["", "  ", "nonsense", "postgresql://h:port/x", "postgresql://h/x?nonsense=1"])
def test_what_is_no_url_is_refused_with_the_form(url: str) -> None:
    with pytest.raises(BadInputError, match="postgresql://user"):
        db.parse_url(url)


def test_options_are_refused_since_poolers_drop_them() -> None:
    with pytest.raises(BadInputError, match=r"'options'.*ALTER ROLE"):
        db.parse_url("postgresql://h/x?options=-cwork_mem%3D1")


def test_a_colon_in_the_users_name_is_named() -> None:
    with pytest.raises(BadInputError, match="a : in the user's name is not taken") as raised:
        db.parse_url("user=u:s3cr3t host=h")
    assert "s3cr3t" not in str(raised.value)


def test_a_database_that_is_away_is_said_with_what_to_check() -> None:
    with pytest.raises(DatabaseUnavailableError, match=r"u@127\.0\.0\.1:1/x: .*refused.*check that it runs"):
        db.connect(f"postgresql://u:s3cr3t@{NOWHERE}/x", application_name="test")
    with pytest.raises(DatabaseUnavailableError, match=r"/tmp/nowhere.*No such file"):
        db.connect("postgresql:///x?host=/tmp/nowhere", application_name="test")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at postgresql://u:s3cr3t@h/x", "at postgresql://u:***@h/x"),
        ("postgresql+psycopg2://u:s3:cr3t@h/x and postgres://v:w@h", "postgresql+psycopg2://u:***@h/x and postgres://v:***@h"),
        ("host=h password=s3cr3t user=u", "host=h password=*** user=u"),
        ("Password = s3cr3t", "Password = ***"),
        ("postgresql://u:s3@cr3t@h/x", "postgresql://u:***@h/x"),
        ("password='s3 cr3t' user=u", "password=*** user=u"),
        ('{"password": "s3cr3t", "user": "u"}', '{"password": ***, "user": "u"}'),
        ("nothing to hide: 10:30 a@b", "nothing to hide: 10:30 a@b"),
    ],
)  # fmt: skip
def test_passwords_are_struck_out_of_recorded_errors(text: str, shown: str) -> None:
    assert db.redact(text) == shown
    assert db.primary_message(ValueError(text)) == f"ValueError: {shown}"
