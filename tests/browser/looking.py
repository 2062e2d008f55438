"""How a page is looked at: opened at a width and in a theme, judged, and kept as a picture."""

import base64
import json
from pathlib import Path

WIDTHS = (390, 1024, 1600)
THEMES = ("light", "dark")
SCREENSHOTS = Path(__file__).parent / "screenshots"


def open_page(browser, path: Path, width: int = 1024, theme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(path.as_uri())


def unfold(browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")


def requested(browser) -> set[str]:
    """Every address that the page asked for since it was opened."""
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    sent = (m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent")
    return {url for url in sent if not url.startswith("data:")}


def width_needed(browser) -> int:
    return browser.execute_script("return document.scrollingElement.scrollWidth")


def dead_links(browser) -> list[str]:
    """Links within the page that lead nowhere."""
    return browser.execute_script("""
        const links = [...document.querySelectorAll('a[href^="#"]')].map((a) => a.hash.slice(1));
        return links.filter((id) => !document.getElementById(id));
    """)


def figures_without_numbers(browser) -> list[str]:
    return browser.execute_script("""
        return [...document.querySelectorAll("figure.plot")].filter((figure) => {
            const elsewhere = document.getElementById(figure.querySelector("svg").dataset.table);
            return !(figure.querySelector("table") ?? elsewhere)?.querySelector("tbody tr");
        }).map((figure) => figure.id);
    """)


def cut_or_overlapping(browser) -> list[str]:
    """Texts of visible figures that stick out of their drawing, or that lie on each other."""
    return browser.execute_script("""
        const bad = [];
        for (const svg of document.querySelectorAll("figure.plot svg")) {
            const whole = svg.getBoundingClientRect();
            if (!whole.width) continue;
            const name = svg.closest("figure").id;
            const found = [...svg.querySelectorAll("text")];
            const texts = found.map((text) => [text.textContent, text.getBoundingClientRect()]);
            texts.forEach(([text, box], k) => {
                const beside = box.left < whole.left - 3 || box.right > whole.right + 3;
                const beyond = box.top < whole.top - 3 || box.bottom > whole.bottom + 3;
                if (beside || beyond) bad.push(`${name}: ${text} is cut`);
                for (const [other, to] of texts.slice(k + 1)) {
                    const wide = Math.min(box.right, to.right) - Math.max(box.left, to.left);
                    const high = Math.min(box.bottom, to.bottom) - Math.max(box.top, to.top);
                    if (wide > 2 && high > 4) bad.push(`${name}: ${text} lies on ${other}`);
                }
            });
        }
        return bad;
    """)


def faults(browser, axe: str) -> list:
    """What axe-core finds, everything unfolded."""
    unfold(browser)
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    # What it passes is as long as the page, thousands of times over: it stays in the browser.
    found = browser.execute_async_script("""
        const options = { resultTypes: ["violations"] };
        axe.run(options).then((found) => arguments[arguments.length - 1](found.violations));
    """)
    return [(v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"]) for v in found]


def screenshot(browser, name: str, width: int) -> None:
    """The whole page as a picture, to be looked at by a person."""
    height = browser.execute_script("return document.documentElement.scrollHeight")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    SCREENSHOTS.mkdir(exist_ok=True)
    (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))
