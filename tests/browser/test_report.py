"""The report in a real browser: offline, at every width, in both themes, with and without JavaScript."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.browser.conftest import SCREENSHOTS

pytestmark = pytest.mark.browser

WIDTHS = (390, 1024, 1600)
THEMES = ("light", "dark")
KINDS = ("burst", "lossy", "hopeless", "single")


def open_page(browser, path: Path, width: int = 1024, theme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(path.as_uri())


def requested(browser) -> set[str]:
    """Every address that the page asked for since it was opened."""
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = (m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent")
    return {url for url in sent if not url.startswith("data:")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", THEMES)
def test_the_page_is_quiet_offline_and_fits(browser, pages, kind, width, theme):
    open_page(browser, pages[kind], width, theme)
    assert browser.get_log("browser") == []
    assert requested(browser) == {pages[kind].as_uri()}
    wide = browser.execute_script("return document.scrollingElement.scrollWidth")
    assert wide <= width
    screenshot(browser, f"{kind}-{width}-{theme}", width)


def screenshot(browser, name: str, width: int) -> None:
    """The whole page as a picture, to be looked at by a person."""
    height = browser.execute_script("return document.documentElement.scrollHeight")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    SCREENSHOTS.mkdir(exist_ok=True)
    (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


def test_the_themes_differ_and_the_switch_overrides_the_system(browser, pages):
    def paper() -> str:
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    open_page(browser, pages["lossy"], theme="dark")
    dark = paper()
    button = browser.find_element("id", "theme")
    button.click()
    assert (button.text, paper() != dark) == ("Theme: light", True)
    open_page(browser, pages["lossy"], theme="light")
    button = browser.find_element("id", "theme")
    assert button.text == "Theme: light"
    button.click()
    assert (button.text, paper()) == ("Theme: dark", dark)
    button.click()
    assert (button.text, paper() != dark) == ("Theme: auto", True)


def test_hovering_a_figure_reads_its_own_table(browser, pages):
    open_page(browser, pages["burst"], 1600)
    readout = browser.execute_script("""
        const svg = document.querySelector("#timeline svg");
        const box = svg.getBoundingClientRect();
        const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true };
        svg.dispatchEvent(new PointerEvent("pointermove", at));
        return document.querySelector("#timeline .readout").textContent;
    """)
    assert readout.startswith("From (s) ")
    assert "Output tokens (tok/s)" in readout
    assert browser.execute_script('return document.querySelectorAll("#timeline .crosshair").length') == 1


def test_the_requests_sort_by_the_column_that_is_clicked(browser, pages):
    open_page(browser, pages["lossy"], 1600)
    firsts = browser.execute_script("""
        const table = document.getElementById("all-requests");
        const titles = [...table.tHead.rows[0].cells];
        const column = titles.findIndex((c) => c.textContent.startsWith("E2E"));
        const heading = table.tHead.rows[0].cells[column];
        const first = () => table.tBodies[0].rows[0].cells[column].textContent;
        const told = [];
        for (let k = 0; k < 2; k++) {
            heading.click();
            told.push(heading.getAttribute("aria-sort"), first());
        }
        return told;
    """)
    assert firsts[0] == "descending"
    assert firsts[1] == "∞"
    assert firsts[2] == "ascending"
    assert float(firsts[3]) > 0


def test_a_link_into_folded_numbers_unfolds_them(browser, pages):
    open_page(browser, pages["lossy"], 1024)
    target = browser.execute_script("""
        const link = [...document.querySelectorAll('#failures a')].find((a) => a.hash.startsWith("#r"));
        link.click();
        return link.hash.slice(1);
    """)
    browser.implicitly_wait(2)
    assert browser.find_element("css selector", f"details[open] tr[id='{target}']").is_displayed()


def test_without_javascript_everything_is_there(browser, pages):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        open_page(browser, pages["burst"])
        assert browser.find_element("id", "theme").is_displayed() is False
        assert len(browser.find_elements("css selector", "figure.plot svg.wide, .side svg")) >= 6
        for summary in browser.find_elements("css selector", "#requests summary"):
            summary.click()
        assert browser.find_element("id", "all-requests").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "install", "--silent", "--prefix", folder, "axe-core@4"], check=True, timeout=100)
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


@pytest.mark.parametrize("kind", ["lossy", "hopeless"])
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [390, 1600])
def test_axe_finds_nothing_serious(browser, pages, axe, kind, theme, width):
    open_page(browser, pages[kind], width, theme)
    browser.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    found = browser.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    grave = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert [(v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"]) for v in grave] == []


def test_paper_is_light_whatever_the_theme(browser, pages):
    open_page(browser, pages["lossy"], theme="dark")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    try:
        assert browser.execute_script("return getComputedStyle(document.body).color") == "rgb(27, 36, 48)"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
