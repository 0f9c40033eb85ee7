"""Structured log lines: readable as text, whole as JSON, and nobody else's logging is touched."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from uuid import UUID

import pytest
import structlog

from gaffer_dagster.domain.run import Outcome
from gaffer_dagster.engine.log import BriefFormatter, JsonFormatter, wrap
from gaffer_dagster.store import db

AT = datetime(2027, 3, 1, 12, tzinfo=timezone(timedelta(hours=1)))


@pytest.fixture
def lines() -> tuple[logging.Logger, io.StringIO]:
    logger, stream = logging.getLogger("test_log"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.DEBUG)
    return logger, stream


def test_a_line_as_json_has_its_fields(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = lines
    log = wrap(logger, job="carrier_delay").bind(run_id=7)
    log.info(
        "ended", outcome=Outcome.SUCCEEDED, ended_at=AT, took=timedelta(seconds=90), items=3, ratio=0.5, error=None
    )
    line = json.loads(stream.getvalue())
    at = datetime.fromisoformat(line.pop("at"))
    assert at.utcoffset() == timedelta()
    assert line == {
        "level": "info",
        "logger": "test_log",
        "event": "ended",
        "job": "carrier_delay",
        "run_id": 7,
        "outcome": "succeeded",
        "ended_at": "2027-03-01T11:00:00+00:00",
        "took": 90.0,
        "items": 3,
        "ratio": 0.5,
        "error": None,
    }


def test_a_line_as_text_reads_like_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    wrap(logging.getLogger("text"), job="carrier_delay").info("committed", batch=2, why="a b", at=AT)
    wrap(logging.getLogger("text")).warning("alone")
    assert caplog.messages == [
        "carrier_delay committed: batch=2 why='a b' at=2027-03-01T11:00:00+00:00",
        "gaffer alone",
    ]


def test_any_value_is_one_line_of_json(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = lines
    log = wrap(logger)
    log.info("odd", text='two\nlines "quoted" % {}', ident=UUID(int=7), kinds={1}, raw=b"\xff", nested={"at": AT})
    logger.info("from %s", "elsewhere")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["text"] == 'two\nlines "quoted" % {}'
    assert first["ident"] == str(UUID(int=7))
    assert second["event"] == "from elsewhere"


def test_an_exception_is_part_of_the_line(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = lines
    try:
        raise ValueError("no")
    except ValueError:
        wrap(logger).error("failed", exc_info=True)
    line = json.loads(stream.getvalue())
    assert line["event"] == "failed"
    assert line["exception"].endswith("ValueError: no")


def test_lines_below_the_loggers_level_are_not_written(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = lines
    logger.setLevel(logging.WARNING)
    wrap(logger).info("silent")
    assert stream.getvalue() == ""


def test_what_is_bound_around_a_run_is_part_of_its_lines(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = lines
    with structlog.contextvars.bound_contextvars(dagster_run_id="abc"):
        wrap(logger).info("leased")
    assert json.loads(stream.getvalue())["dagster_run_id"] == "abc"


def test_structlog_is_never_configured_for_the_process() -> None:
    code = (
        "import logging, structlog; import gaffer_dagster.engine.run, gaffer_dagster.cli;"
        "from gaffer_dagster.engine.log import wrap; wrap(logging.getLogger('x'), job='a').warning('said');"
        "print(structlog.is_configured(), logging.getLogger().handlers, logging.getLogger('gaffer').handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False [] []", done.stderr
    assert not structlog.is_configured()


def test_a_line_is_text_that_dagster_can_store_and_has_no_password(caplog: pytest.LogCaptureFixture) -> None:
    wrap(logging.getLogger("test_text")).warning("caf\udce9", path="a\udce9", url="postgresql://bob:SECRET@h/db")
    assert caplog.messages == ["gaffer caf?: path='a\\udce9' url=postgresql://bob:***@h/db"]


@pytest.mark.parametrize("formatter", [JsonFormatter(), BriefFormatter()])
def test_an_exception_too_long_to_be_read_is_cut_and_has_no_password(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("postgresql://bob:SECRET@h/db " + "x" * 20_000_000)
    except ValueError as error:
        record = logging.LogRecord("gaffer", logging.ERROR, "", 0, "failed", None, (type(error), error, None))
        said = db.primary_message(error)
    shown = formatter.format(record)
    assert len(said) == db.MOST_SAID
    assert len(shown) < 2 * db.MOST_SAID
    for text in (said, shown):
        assert "ValueError: postgresql://bob:***@h/db xxx" in text
        assert "(cut; it has 20,000,0" in text
