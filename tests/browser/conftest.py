"""Debian's Chromium without a network, and the pages it opens."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports.page import render
from tests.reports import synthetic

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
SCREENSHOTS = Path(__file__).parent / "screenshots"


@pytest.fixture(scope="session")
def browser() -> Iterator:
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.fail("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind of run, by name."""
    folder = tmp_path_factory.mktemp("pages")
    kinds = {
        "burst": synthetic.records(n=1000),
        "lossy": synthetic.records(n=200, n_failed=23),
        "hopeless": synthetic.records(n=20, n_failed=20),
        "single": synthetic.records(n=1),
    }
    for name, rows in kinds.items():
        run = synthetic.finished_run(folder, rows, watched=name != "single")
        (folder / f"{name}.html").write_text(render(run))
    return {name: folder / f"{name}.html" for name in kinds}
