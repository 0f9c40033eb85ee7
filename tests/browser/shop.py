"""The pages that the tests look at, and that the pictures of the documents are made of: a `dagster dev` with the jobs
of a small shop and some of their history, and a Chromium that visits it."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest
from playwright.sync_api import Page, sync_playwright

from gaffer_dagster.adapter.assets import job_of
from gaffer_dagster.domain.spec import JobSpec
from tests.dagster.deployment import Deployment, deployment, shipped_yaml, wait_until
from tests.support import faults, jobs

PROJECT = Path(__file__).parent / "project" / "definitions.py"
CHROMIUM = Path("/usr/bin/chromium")
_ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
_REPOSITORY = '{repositoryLocationName: "location", repositoryName: "__repository__"}'
_SCHEDULES = (
    f"query {{ schedulesOrError(repositorySelector: {_REPOSITORY}) "
    "{ ... on Schedules { results { scheduleState { id } } } } }"
)
_SCHEDULE_OFF = "mutation ($id: String!) { stopRunningSchedule(id: $id) { __typename } }"


class Shop:
    """`url`: of its database, which GAFFER_DATABASE_URL names. Its runs are executed here, and seen in the webserver,
    which has the same storage."""

    def __init__(self, dagster: Deployment, url: str) -> None:
        self.dagster = dagster
        self.url = url
        spec = importlib.util.spec_from_file_location("shop_definitions", PROJECT)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def run(self, name: str, tags: Mapping[str, str] | None = None) -> dg.ExecuteInProcessResult:
        with dg.DagsterInstance.from_config(str(self.dagster.home)) as instance:
            job = self.module.defs.resolve_job_def(f"{name}_job")
            return job.execute_in_process(instance=instance, raise_on_error=False, tags=dict(tags or {}))

    def spec(self, name: str) -> JobSpec:
        return job_of(getattr(self.module, name)).spec

    def order(self, count: int) -> None:
        jobs.execute(self.url, "insert into orders (amount) select n from generate_series(1, %s) n", count)
        faults.settle(self.url)


@contextmanager
def open_shop(home: Path, url: str) -> Generator[Shop]:
    """With a daemon that starts nothing by itself, so that what the pages show stays."""
    jobs.make_source(url, table="orders")
    jobs.execute(url, "alter table orders rename column value to amount")
    jobs.execute(url, "create table revenue (order_id bigint, amount text)")
    jobs.execute(url, "create table daily_report (since timestamptz, until timestamptz)")
    jobs.execute(url, "create table letters (id int primary key, address text, sent_at timestamptz)")
    with deployment(home, url, shipped_yaml(), PROJECT) as dagster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAFFER_DATABASE_URL", url)
        dagster.start("dagster", "dev", "-h", "127.0.0.1", "-p", str(dagster.port))
        wait_until(dagster.is_up, 240, "the webserver")
        dagster.watch(on=False)
        for each in dagster.graphql(_SCHEDULES)["schedulesOrError"]["results"]:
            dagster.graphql(_SCHEDULE_OFF, id=each["scheduleState"]["id"])
        shop = Shop(dagster, url)
        _work(shop)
        yield shop


def _work(shop: Shop) -> None:
    for count in (120, 310, 0, 450, 1_240):  # of the last one something is left
        shop.order(count)
        assert shop.run("revenue").success
    assert shop.run("daily_report").success
    jobs.execute(shop.url, "insert into letters values (1, 'Main Street 1'), (2, null)")
    assert shop.run("mailing").success


@contextmanager
def open_browser(shop: Shop) -> Iterator[Page]:
    """A page whose paths are those of the webserver."""
    assert CHROMIUM.exists(), f"{CHROMIUM} is missing, and the pages cannot be looked at; run: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=_ARGS)
        context = browser.new_context(
            base_url=f"http://127.0.0.1:{shop.dagster.port}",
            viewport={"width": 1400, "height": 1000},
            timezone_id="America/New_York",
            locale="en-US",
        )
        context.set_default_timeout(60_000)
        yield context.new_page()
        browser.close()


def see(page: Page, path: str) -> None:
    """The first page of an asset, once everything is there: its description comes late, and moves the rest."""
    page.goto(path)
    for text in ("By hand:", "gaffer/summary", "Lease:"):
        page.get_by_text(text).first.wait_for()


def type_config(page: Page, config: str) -> None:
    """In place of what stands in the Launchpad that is open."""
    page.locator(".CodeMirror").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(config)


def launch(page: Page) -> str:
    """The id of the run whose page it leads to."""
    page.get_by_role("button", name="Launch Run").click()
    page.wait_for_url("**/runs/*")
    return page.url.rsplit("/", 1)[-1].split("?")[0]
