"""The report in a real browser: offline, at every width, in both themes, with and without JavaScript."""

import time

import pytest

from tests.browser.kinds import COMPARISONS, DECISIONS, RUNS, SUITES
from tests.browser.looking import (
    THEMES,
    WIDTHS,
    cut_or_overlapping,
    dead_links,
    faults,
    figures_without_numbers,
    open_page,
    requested,
    screenshot,
    unfold,
    width_needed,
)

pytestmark = pytest.mark.browser
TWO_SCREENS = 2 * 844
"""Of a phone, in CSS pixels."""
A4 = (688, 1017)
"""The width between the margins, upright and on its side, in CSS pixels."""


@pytest.mark.parametrize("kind", [*RUNS, *COMPARISONS, *SUITES, *DECISIONS])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", THEMES)
def test_the_page_is_quiet_offline_whole_and_fits(browser, pages, kind, width, theme):
    open_page(browser, pages[kind], width, theme)
    assert browser.get_log("browser") == []
    assert requested(browser) == {pages[kind].as_uri()}
    assert width_needed(browser) <= width
    screenshot(browser, f"{kind}-{width}-{theme}", width)
    unfold(browser)
    assert width_needed(browser) <= width
    assert dead_links(browser) == []
    assert figures_without_numbers(browser) == []
    assert cut_or_overlapping(browser) == []


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


HOVER = """
    const [id, share] = arguments;
    const svg = [...document.querySelectorAll(`#${id} svg`)].find((svg) => svg.getBoundingClientRect().width);
    svg.scrollIntoView({ block: "center" });
    const box = svg.getBoundingClientRect();
    const [clientX, clientY] = [box.left + box.width * share, box.top + box.height * share];
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true }));
    const readout = svg.nextElementSibling, line = svg.querySelector(".crosshair");
    return {
        told: [...readout.children].map((cell) => cell.textContent),
        inside: readout.getBoundingClientRect().right <= document.documentElement.clientWidth,
        crosshair: line && ["x1", "x2", "y1", "y2"].map((name) => Number(line.getAttribute(name))),
        height: svg.viewBox.baseVal.height,
    };
"""


@pytest.mark.parametrize("width", [390, 1600])
def test_one_crosshair_runs_through_all_panels_of_the_timeline(browser, pages, width):
    open_page(browser, pages["burst"], width)
    unfold(browser)
    deadline = time.monotonic() + 20
    while not browser.execute_script("return !!document.querySelector('#timeline svg + .readout')"):
        assert time.monotonic() < deadline, "the page's script did not reach the timeline"
    found = browser.execute_script(HOVER, "timeline", 0.5)
    names = {"From (s)", "Requests: in flight", "Output tokens (tok/s)", "KV cache in use (%)"}
    assert names <= set(found["told"][::2])
    x1, x2, y1, y2 = found["crosshair"]
    assert (x1, y1, y2) == (x2, 0, found["height"])
    assert found["inside"]
    assert width_needed(browser) <= width


@pytest.mark.parametrize("figure", ["tradeoff-speed", "tradeoff-ttft", "tradeoff-e2e"])
def test_the_points_of_a_trade_off_are_read_where_they_are_drawn(browser, pages, figure):
    open_page(browser, pages["sweep"], 1600)
    rows, marks = browser.execute_script(
        """
        const figure = document.getElementById(arguments[0]);
        const words = (row) => [...row.cells].map((cell) => cell.firstChild.textContent);
        const marks = [...figure.querySelectorAll("svg.wide use")].map((mark) => +mark.getAttribute("x"));
        figure.querySelector("svg.wide").focus();
        return [[...figure.querySelectorAll("tbody tr")].map(words), marks];
        """,
        figure,
    )
    seen = []
    for _ in rows:
        press(browser, "ArrowRight")
        told, x = read(browser)
        seen.append(told[1::2])
        assert min(abs(x - mark) for mark in marks) < 4  # the table has three digits, the drawing all
    assert seen == rows


def press(browser, key: str) -> None:
    pressed = "new KeyboardEvent('keydown', { key: arguments[0], cancelable: true })"
    browser.execute_script(f"document.activeElement.dispatchEvent({pressed})", key)


def read(browser) -> tuple[list[str], float | None]:
    """Names and values in turn beside the figure that has the focus, and where its crosshair stands."""
    return browser.execute_script("""
        const svg = document.activeElement, line = svg.querySelector(".crosshair");
        const told = [...svg.nextElementSibling.children].map((cell) => cell.textContent);
        return [told, line && Number(line.getAttribute("x1"))];
    """)


def test_the_arrow_keys_walk_through_a_figure_that_tab_reaches(browser, pages):
    open_page(browser, pages["burst"], 1600)
    unfold(browser)
    browser.execute_script("document.querySelector('#timeline svg.wide').focus()")
    assert browser.execute_script("return document.activeElement.closest('figure').id") == "timeline"
    walk = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"):
        press(browser, key)
        walk.append(float(read(browser)[0][1]))
    assert walk[0] == walk[2] == walk[4] == 0
    assert 0 < walk[1] < walk[3]
    press(browser, "Escape")
    assert read(browser) == [[], None]


def test_hovering_a_row_tells_of_the_request_that_is_drawn_there(browser, pages):
    open_page(browser, pages["lossy"], 1600)
    unfold(browser)
    found = browser.execute_script(HOVER, "rows", 0.3)
    rows, limits = browser.execute_script(
        "const f = document.getElementById('rows');"
        "return [f.dataset.rows.split(' '), f.querySelector('svg.wide').dataset.range.split(',')]"
    )
    start, end, first, last = map(float, limits)
    place = first + (0.3 * found["height"] - start) / (end - start) * (last - first)
    assert found["told"][0] == "Request"
    assert found["told"][1] in {f"#{k}" for k in rows[round(place) - 2 : round(place) + 1]}


def test_a_thousand_rows_are_few_elements_to_hover_over(browser, pages):
    open_page(browser, pages["burst"], 1600)
    assert 0 < browser.execute_script("return document.querySelectorAll('#rows svg.wide *').length") < 400


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
            heading.querySelector("button").click();
            told.push(heading.getAttribute("aria-sort"), first());
        }
        return told;
    """)
    assert firsts[0] == "descending"
    assert firsts[1] == "∞"
    assert firsts[2] == "ascending"
    assert float(firsts[3]) > 0


def test_a_table_is_sorted_by_the_keyboard_alone(browser, pages):
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    open_page(browser, pages["sweep"], 1600)
    heading = browser.find_element("css selector", "table.sortable thead th:nth-child(3)")
    button = heading.find_element("tag name", "button")
    button.send_keys(keys.ENTER)
    assert heading.get_attribute("aria-sort") == "descending"
    button.send_keys(keys.SPACE)
    assert heading.get_attribute("aria-sort") == "ascending"


def test_a_load_in_the_table_leads_to_its_own_numbers(browser, pages):
    open_page(browser, pages["sweep"], 1024)
    target = browser.execute_script("""
        const link = document.querySelector("#tradeoff table.sortable tbody a");
        link.click();
        return link.hash.slice(1);
    """)
    browser.implicitly_wait(2)
    assert browser.find_element(
        "css selector", f"details[open][id='{target}'] > .scroll table"
    ).is_displayed()


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


@pytest.mark.parametrize(
    "kind",
    [
        "burst",
        "lossy",
        "hopeless",
        "three",
        "sweep",
        "unequal",
        "suite",
        "gate",
        "undecided",
        "series",
        "limit",
        "certificate",
        "exact",
        "bound",
        "devices",
        "study",
    ],
)
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [390, 1600])
def test_axe_finds_nothing(browser, pages, axe, kind, theme, width):
    open_page(browser, pages[kind], width, theme)
    assert faults(browser, axe) == []


def test_paper_is_light_whatever_the_theme(browser, pages):
    open_page(browser, pages["lossy"], theme="dark")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    try:
        assert browser.execute_script("return getComputedStyle(document.body).color") == "rgb(27, 36, 48)"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.parametrize(
    "kind", ["burst", "slo", "lossy", "three", "sweep", "suite", "gate", "limit", "certificate"]
)
@pytest.mark.parametrize("width", A4)
def test_paper_cuts_nothing_off(browser, pages, kind, width):
    open_page(browser, pages[kind], width)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert width_needed(browser) <= width
        beyond = browser.execute_script("""
            const width = document.documentElement.clientWidth;
            const box = (e) => e.getBoundingClientRect();
            const cut = (e) => box(e).height && box(e).right > width + 1;
            const found = [...document.querySelectorAll("body *")].filter(cut);
            return found.map((e) => e.textContent.slice(0, 40));
        """)
        assert beyond == []
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.parametrize("kind", ["burst", "tail", "eight", "interrupted", "slo"])
def test_a_runs_page_answers_on_its_first_screen(browser, pages, kind):
    """Before anything is unfolded."""
    open_page(browser, pages[kind], 1440)
    first, whole, words = browser.execute_script("""
        const [first, whole] = ["header", "html"].map((name) => document.querySelector(name).scrollHeight);
        return [first, whole, document.body.innerText.split(/\\s+/).length];
    """)
    assert first <= 900
    assert whole <= 1300
    assert words <= 450
    open_page(browser, pages[kind], 390)
    assert browser.execute_script("return document.querySelector('header').scrollHeight") <= TWO_SCREENS
