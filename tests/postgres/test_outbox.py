"""The recipe of docs/outbox.md: both examples, run as they are, against a real server that they have effects on."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests

from gaffer_dagster.adapter.assets import GafferJob, job_of
from gaffer_dagster.domain.run import RunRecord
from gaffer_dagster.engine.batch import Batch
from gaffer_dagster.store import db, prepare
from gaffer_dagster.testing import Clock
from tests.support import jobs

EXAMPLES = Path(__file__).parents[2] / "examples"
_CONTEXT = multiprocessing.get_context("forkserver")


class Outside:
    """A service that does a POST once for each Idempotency-Key, and a store that honours `If-None-Match: *`.

    `answers`: instead of doing what the next requests ask for. `holds`: what is asked for is done, and not answered.
    """

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.holds = False
        self.names: list[str] = []
        """Of each request: its key, or the object's name."""
        self.effects: dict[str, bytes] = {}
        self.statuses: list[int] = []
        self.taken = threading.Semaphore(0)
        self.closed = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._take(self.headers.get("Idempotency-Key") or str(uuid.uuid4()), 200)

            def do_PUT(self) -> None:
                assert self.headers["If-None-Match"] == "*"
                assert int(self.headers["x-amz-meta-gaffer-fence"]) > 0
                self._take(self.path, 412)

            def _take(self, name: str, again: int) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.names.append(name)
                if outer.answers:
                    status = outer.answers.pop(0)
                elif name in outer.effects:
                    status = again
                else:
                    status, outer.effects[name] = 200, body
                outer.statuses.append(status)
                outer.taken.release()
                if outer.holds:
                    outer.closed.wait()
                    return
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    made = Outside()
    monkeypatch.setenv("OUTBOX_URL", made.url)
    monkeypatch.setenv("BUCKET_URL", made.url)
    yield made
    made.close()


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HTTP, STORE = "outbox_http", "outbox_object_store"
DELIVERS = {HTTP: "tell", STORE: "upload"}


def delivery(name: str) -> GafferJob:
    return job_of(getattr(example(name), DELIVERS[name]))


def make(url: str, rows: int = 0) -> None:
    """The tables, as the examples say, and rows that wait in the outbox."""
    for text in (example(HTTP).__doc__ or "").split("\n"):
        if text.strip().startswith("create table"):
            jobs.execute(url, text)
    with db.connect(url, application_name="test") as connection:
        prepare.apply(connection, prepare.statements(connection, "orders", "id", changed=False))
        prepare.apply(connection, prepare.pending_statements(connection, "outbox", "id", "sent_at is null"))
    jobs.execute(url, "insert into outbox (body) select 'body ' || n from generate_series(1, %s::int) n", rows)


def deliver(url: str, name: str, clock: Clock) -> RunRecord:
    job = delivery(name)
    return jobs.run(job.spec, url, job.work, worker_clock=clock.now)


def waiting(url: str) -> list[int]:
    return [key for (key,) in jobs.query(url, "select id from outbox where sent_at is null order by id")]


def items(url: str) -> list[tuple[Any, ...]]:
    return jobs.query(url, "select key, attempts, parked_at is not null, error from gaffer.job_item order by key")


def test_what_is_written_in_the_batch_is_delivered(url: str, clock: Clock, outside: Outside) -> None:
    make(url)
    jobs.execute(url, "insert into orders (amount) values (5), (7)")
    book = job_of(example(HTTP).book)
    assert jobs.run(book.spec, url, book.work, worker_clock=clock.now).items == 2
    assert outside.names == []
    assert deliver(url, HTTP, clock).outcome == "succeeded"
    assert outside.effects == {"tell/1": b'{"order": 1, "amount": 5}', "tell/2": b'{"order": 2, "amount": 7}'}
    assert (waiting(url), deliver(url, HTTP, clock).items) == ([], 0)
    assert outside.names == ["tell/1", "tell/2"]


def test_a_batch_that_failed_leaves_nothing_to_deliver(url: str, clock: Clock, outside: Outside) -> None:
    make(url)
    jobs.execute(url, "insert into orders (amount) values (5)")
    book = job_of(example(HTTP).book)

    def fails(batch: Batch) -> None:
        book.work(batch)
        raise ValueError("after all")

    with pytest.raises(ValueError, match="after all"):
        jobs.run(book.spec, url, fails, worker_clock=clock.now)
    assert jobs.query(url, "select count(*) from outbox") == jobs.query(url, "select count(*) from booked") == [(0,)]
    assert deliver(url, HTTP, clock).items == 0
    assert outside.names == []


def test_the_broken_variant_that_sends_at_once_tells_what_never_was(url: str, clock: Clock, outside: Outside) -> None:
    make(url)
    jobs.execute(url, "insert into orders (amount) values (5)")

    def sends(batch: Batch) -> None:
        batch.insert("booked", [{"order_id": row["id"], "amount": row["amount"]} for row in batch.rows])
        requests.post(outside.url, data=b"booked", timeout=5)
        raise ValueError("after all")

    with pytest.raises(ValueError, match="after all"):
        jobs.run(job_of(example(HTTP).book).spec, url, sends, worker_clock=clock.now)
    assert list(outside.effects.values()) == [b"booked"]
    assert jobs.query(url, "select count(*) from booked") == [(0,)]


@pytest.mark.parametrize("name", [HTTP, STORE])
def test_what_is_answered_with_500_is_sent_again_with_the_same_key_behind_the_others(
    url: str, clock: Clock, outside: Outside, name: str
) -> None:
    make(url, 3)
    outside.answers = [500]
    assert deliver(url, name, clock).outcome == "partial"
    assert waiting(url) == [1]
    assert [row[:3] for row in items(url)] == [("1", 1, False)]
    assert "answered 500" in items(url)[0][3]
    clock.advance(timedelta(minutes=5))
    assert deliver(url, name, clock).outcome == "succeeded"
    first, second, third, again = outside.names
    assert (again, len({first, second, third})) == (first, 3)
    assert sorted(outside.effects.values()) == [b"body 1", b"body 2", b"body 3"]
    assert (waiting(url), items(url)) == ([], [])


@pytest.mark.parametrize("name", [HTTP, STORE])
def test_what_is_refused_each_time_is_parked(url: str, clock: Clock, outside: Outside, name: str) -> None:
    make(url, 1)
    attempts = 8
    outside.answers = [422] * attempts
    for _ in range(attempts):
        assert deliver(url, name, clock).outcome == "partial"
        clock.advance(timedelta(hours=2))
    assert [row[:3] for row in items(url)] == [("1", attempts, True)]
    assert deliver(url, name, clock).items == 0
    assert (waiting(url), len(outside.names), outside.effects) == ([1], attempts, {})


def _new_key(_batch: Batch, _row: Any) -> str:
    return str(uuid.uuid4())


def _deliver_in_a_process(url: str, address: str, name: str, new_keys: bool) -> None:
    os.environ["OUTBOX_URL"] = os.environ["BUCKET_URL"] = address  # the server that forks has those of an earlier test
    if new_keys:
        Batch.key_for = _new_key  # type: ignore[method-assign]
    deliver(url, name, Clock(url))


def killed_before_commit(url: str, outside: Outside, clock: Clock, name: str, *, new_keys: bool = False) -> None:
    """A process that is killed once the other side has done what it asked for; then a run that is not."""
    make(url, 1)
    outside.holds = True
    first = _CONTEXT.Process(target=_deliver_in_a_process, args=(url, outside.url, name, new_keys), daemon=True)
    first.start()
    try:
        assert outside.taken.acquire(timeout=60)
    finally:
        first.kill()
        first.join()
    assert first.exitcode == -signal.SIGKILL
    assert (waiting(url), len(outside.effects)) == ([1], 1)
    outside.holds = False
    clock.advance(timedelta(minutes=5))  # past its lease
    with pytest.MonkeyPatch.context() as patched:
        if new_keys:
            patched.setattr(Batch, "key_for", _new_key)
        deliver(url, name, clock)
    assert (waiting(url), len(outside.names)) == ([], 2)
    assert jobs.query(url, "select outcome from gaffer.job_runs order by id") == [("abandoned",), ("succeeded",)]


@pytest.mark.parametrize(("name", "second_answer"), [(HTTP, 200), (STORE, 412)])
def test_killed_between_the_effect_and_commit_it_is_sent_twice_and_done_once(
    url: str, clock: Clock, outside: Outside, name: str, second_answer: int
) -> None:
    killed_before_commit(url, outside, clock, name)
    assert outside.names[0] == outside.names[1]
    assert (list(outside.effects.values()), outside.statuses) == ([b"body 1"], [200, second_answer])


def test_the_broken_variant_with_a_new_key_for_each_attempt_does_it_twice(
    url: str, clock: Clock, outside: Outside
) -> None:
    killed_before_commit(url, outside, clock, HTTP, new_keys=True)
    assert list(outside.effects.values()) == [b"body 1", b"body 1"]
