"""The pictures in docs/service.md: jobs of two priorities share a local cluster of four nodes; an
urgent one has made the others give way.

    python benchmarks/service_picture.py [--out docs]

Needs a headless Chromium and Playwright: `pip install -e .[browser]`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.report_picture import BROWSERS, ROOT
from benchmarks.service_demo import NODES, SOON_S, START_S, Demo, job

HISTORY = 150  # steps, so that there is a curve to look at


def share(demo: Demo) -> str:
    """Returns the id of a job that has given way in place, and has grown back."""
    demo.start()
    others = [demo.submit(name, 0, job(100_000, 1, 3)) for name in ("llama-small", "ablation")]
    step = lambda id: demo.client.status(id)["step"]  # noqa: E731
    demo.until("both train", lambda: min(map(step, others)) > HISTORY, START_S)
    passing = demo.submit("evaluation", 10, job(HISTORY, 2, 2))
    demo.client.wait(passing, START_S)
    full = lambda: sum(map(demo.workers, others)) == NODES  # noqa: E731
    demo.until("both have grown back", full, START_S)
    urgent = demo.submit("hotfix", 10, job(100_000, 2, 2))
    demo.submit("sweep", 0, job(100_000, 3, 4))
    demo.until("the urgent job trains", lambda: step(urgent) > HISTORY, SOON_S)
    return max(others, key=lambda id: len([*demo.client.events(id)]))


def photograph(url: str, one: str, out: Path) -> None:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    looks = [
        ("service.png", "", (1000, 330), "light", "table tbody tr"),
        ("service-job.png", f"jobs/{one}", (1000, 1370), "light", "path.loss"),
        ("service-phone.png", "", (390, 800), "dark", "table tbody tr"),
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, place, (width, height), scheme, awaited in looks:
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(f"{url}/{place}")
            page.wait_for_selector(awaited, timeout=SOON_S * 1000)
            page.screenshot(path=out / name)
            print(f"{out / name}: {(out / name).stat().st_size / 1000:.0f} kB")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    demo = Demo(Path(tempfile.mkdtemp(prefix="service-picture-")))
    try:
        one = share(demo)
        photograph(demo.environment["ELASTIC_FT_SERVICE"], one, options.out)
    finally:
        if "ELASTIC_FT_SERVICE" in demo.environment:
            demo.terminal("service", "stop", "--jobs", "stop")


if __name__ == "__main__":
    main()
