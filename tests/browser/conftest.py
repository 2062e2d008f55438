"""Debian's Chromium without a network, and the pages it opens."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.browser.kinds import Pages

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))


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
    driver.set_script_timeout(300)  # a busy machine is no fault of a page
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """A page of each kind, by name."""
    return Pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "install", "--silent", "--prefix", folder, "axe-core@4"], check=True, timeout=100)
    return (folder / "node_modules/axe-core/axe.min.js").read_text()
