"""What the pages of the webserver say, seen in Chromium on a real `dagster dev`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from uuid import uuid4

import pytest
from playwright.sync_api import Locator, Page, expect

from gaffer_dagster.testing import scratch_database
from tests.browser.shop import Shop, launch, open_browser, open_shop, see, type_config
from tests.dagster.deployment import wait_until
from tests.support import jobs

expect.set_options(timeout=60_000)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def shop(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with scratch_database(server_url) as url, open_shop(tmp_path_factory.mktemp("shop") / "home", url) as made:
        yield made


@pytest.fixture(scope="module")
def page(shop: Shop) -> Iterator[Page]:
    with open_browser(shop) as opened:
        yield opened


def value(page: Page, key: str, column: int = -1) -> Locator:
    """What the table of an asset's page says of a key."""
    return page.get_by_role("row").filter(has=page.get_by_text(key, exact=True)).locator("td").nth(column)


def summary_of_newest(page: Page, asset: str) -> Locator:
    """Of all its runs, also those that materialized nothing, which the first page leaves out."""
    page.goto(f"/assets/{asset}?view=events")
    return value(page, "gaffer/summary", 1)


def see_drawn(page: Page, key: str, seconds: float = 60) -> None:
    """The plot of this key has more on it than its background."""
    named = page.locator("div").filter(has=page.get_by_text(key, exact=True))
    canvas = named.filter(has=page.locator("canvas")).last.locator("canvas")  # the innermost comes last
    wait_until(lambda: canvas.count() == 1 and canvas.evaluate(_COLOURS) > 1, seconds, f"{key} is plotted")


_COLOURS = """canvas => new Set(new Uint32Array(
    canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"""


def test_the_asset_page_says_what_the_job_is_and_how_it_went(page: Page) -> None:
    see(page, "/assets/revenue")
    expect(page.get_by_text("Revenue by region, added up as orders come in.")).to_be_visible()
    expect(page.locator("em").get_by_text("wiki")).to_be_visible()  # its author's Markdown
    for line in (
        "Wakes: Every hour, at minute 15, in America/New_York (15 * * * *)",
        "Due: rows of orders that are new, each once, in commit order",
        "A run does: at most 5 batches of 200 rows, within 20 minutes; what is left is reported and taken up next",
        "Alerts: a tick 30 minutes late, 3 failed ticks in a row",
    ):
        expect(page.locator("li").get_by_text(line)).to_be_visible()
    summary = value(page, "gaffer/summary")
    expect(summary).to_contain_text("Capped: 1,000 rows in 5 batches done, then a bound was reached; 240 rows left")
    expect(summary).to_contain_text(re.compile(r"Another run is asked for at once; next tick 20.* America/New_York \("))
    expect(summary).to_contain_text(re.compile(r"Lease: fence 5, held by \S+:\d+:[0-9a-f]+"))
    expect(summary).to_be_in_viewport()  # without a click, and without scrolling
    expect(value(page, "gaffer/backlog")).to_have_text("240")
    expect(value(page, "gaffer/commands")).to_contain_text("gaffer ticks revenue")


def test_numbers_of_all_runs_are_plotted(page: Page) -> None:
    see(page, "/assets/revenue")
    page.get_by_text("Plots", exact=True).click()
    for key in ("items", "batches", "backlog", "lag_seconds", "duration_seconds"):
        see_drawn(page, f"gaffer/{key}")
    expect(page.get_by_text("gaffer/outcome")).to_have_count(0)
    with pytest.raises(AssertionError, match="gaffer/outcome is plotted"):
        see_drawn(page, "gaffer/outcome", seconds=1)


def test_what_others_wrote_is_no_markup(page: Page) -> None:
    see(page, "/assets/mailing")
    summary = value(page, "gaffer/summary")
    expect(summary).to_contain_text("Partial: 1 row in 1 batch; nothing else due is left, but rows failed")
    expect(summary.locator("code").first).to_have_text(
        "1 row failed; 2: ValueError: no address | `none` <b>bold</b> [click](https://example.com) **loud** # heading"
    )
    expect(summary).to_contain_text("1 row parked, to be looked at: gaffer items list mailing")
    expect(summary.locator("a, b, h1, table")).to_have_count(0)
    expect(summary.locator("strong")).to_have_count(1)


def test_a_failed_check_says_why_and_what_to_do(page: Page) -> None:
    page.goto("/assets/mailing?view=checks")
    expect(page.get_by_text("1 row failed too often and was given up").first).to_be_visible()
    expect(page.get_by_text("mend the rows, then `gaffer items retry mailing --parked`").first).to_be_visible()


def test_the_schedule_says_when_it_wakes_and_on_which_clock(page: Page) -> None:
    page.goto("/locations/location/schedules/daily_report_schedule")
    expect(page.get_by_text(re.compile(r"^At 06:00 every day, in America/New_York \(0 6 \* \* \*"))).to_be_visible()


def test_a_run_that_was_busy_says_who_holds_the_lease(shop: Shop, page: Page) -> None:
    holder = str(uuid4())
    with jobs.opened(shop.spec("daily_report"), shop.url, dagster_run_id=holder) as run:
        assert shop.run("daily_report").success
        owner = run._holding.owner
    summary = summary_of_newest(page, "daily_report")
    expect(summary).to_contain_text("Busy: another run holds the lease")
    expect(summary).to_contain_text(f"Held by {owner} (fence 2), run ")
    expect(summary.get_by_role("link", name=f"Dagster run {holder[:8]}")).to_have_attribute("href", f"/runs/{holder}")


def test_the_launchpad_scaffolds_what_is_missing_and_names_the_jobs_to_choose_from(page: Page) -> None:
    page.goto("/locations/location/jobs/gaffer_set_watermark/playground")
    editor = page.locator(".CodeMirror-code")
    expect(editor).to_contain_text("dry_run: true")
    expect(page.get_by_text("Only say what would be done again, or skipped.").first).to_be_visible()
    page.get_by_role("button", name="Scaffold missing config").click()
    page.get_by_role("button", name="Confirm").click()
    expect(editor).to_contain_text("job: 'daily_report|revenue'")
    expect(editor).to_contain_text("position: ''")
    expect(page.get_by_role("button", name="Launch Run")).to_be_disabled()


def test_what_is_launched_by_hand_is_checked_done_and_noted(shop: Shop, page: Page) -> None:
    page.goto("/locations/location/jobs/gaffer_pause/playground")
    expect(page.locator(".CodeMirror-code")).to_contain_text("until:")
    type_config(page, "job: revenu")
    expect(page.get_by_text("not in enum type gaffer_pause_job").first).to_be_visible()
    expect(page.get_by_role("button", name="Launch Run")).to_be_disabled()
    type_config(page, "job: revenue\nuntil: 2h\nreason: the source is rebuilt\nby: ann\n")
    run = launch(page)
    assert shop.dagster.finish(run, 120) == "SUCCESS", shop.dagster.events(run)
    expect(page.get_by_text("RUN_SUCCESS")).to_be_visible()
    expect(
        page.get_by_text(re.compile("^revenue: Paused until 20.*; a run that is at work is not stopped"))
    ).to_be_visible()
    noted = "select job, action, by, reason, (details ->> 'until')::timestamptz > now() from gaffer.operator_action"
    assert jobs.query(shop.url, noted) == [("revenue", "pause", "ann", "the source is rebuilt", True)]
    summary = summary_of_newest(page, "revenue")
    expect(value(page, "gaffer/operator", 1)).to_contain_text("By ann: the source is rebuilt")
    expect(summary).to_have_count(0)
    assert shop.run("revenue").success
    summary = summary_of_newest(page, "revenue")
    expect(summary).to_contain_text("Paused: nothing was done")
    expect(summary).to_contain_text(re.compile("Paused by ann at 20.*: the source is rebuilt"))


def test_what_is_refused_says_why_on_its_page(shop: Shop, page: Page) -> None:
    page.goto("/locations/location/jobs/gaffer_redo_interval/playground")
    expect(page.locator(".CodeMirror-code")).to_contain_text("despite_pause:")
    type_config(page, "job: daily_report\ninterval: 2031-03-01\nreason: late rows\n")
    run = launch(page)
    assert shop.dagster.finish(run, 120) == "FAILURE"
    told = page.get_by_text("job 'daily_report' has no interval at 2031-03-01T00:00:00-05:00: it goes from 2026-03-07")
    expect(told.first).to_be_visible()
