"""Makes the pictures of the webserver's pages that the documents show, beside this file: `./dev pictures`.

They are taken of the small shop that the tests look at (tests/browser), which needs Chromium.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gaffer_dagster import local
from gaffer_dagster.testing import scratch_database
from tests.browser.shop import launch, open_browser, open_shop, see, type_config

HERE = Path(__file__).parent
_CONFIG = """\
job: daily_report
position: 2026-03-08
dry_run: true
reason: the rates were wrong
by: ann
"""


def make() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = local.start(Path(folder) / "postgres", fsync=False)
        try:
            with scratch_database(server) as url:
                _take(Path(folder), url)
        finally:
            local.stop(Path(folder) / "postgres")


def _take(folder: Path, url: str) -> None:
    with open_shop(folder / "home", url) as shop, open_browser(shop) as page:

        def picture(name: str) -> None:
            page.mouse.move(0, 0)
            page.wait_for_timeout(1_000)  # what fades in, has
            page.screenshot(path=HERE / f"{name}.png")

        see(page, "/assets/revenue")
        picture("asset")
        page.get_by_text("Plots", exact=True).click()
        page.locator("canvas").first.wait_for()
        page.get_by_text("gaffer/items", exact=True).scroll_into_view_if_needed()
        picture("plots")
        page.goto("/locations/location/jobs/gaffer_set_watermark/playground")
        page.get_by_text("dry_run").first.wait_for()
        type_config(
            page, "job: daily_report\nposition: 2026-03-08\ndry_run: true\nreason: the rates were wrong\nby: ann\n"
        )
        page.get_by_text("No errors").wait_for()
        picture("launchpad")
        launch(page)
        page.get_by_text("RUN_SUCCESS").wait_for(timeout=120_000)
        picture("run")


if __name__ == "__main__":
    os.chdir(tempfile.gettempdir())
    make()
