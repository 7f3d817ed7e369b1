"""The picture in the README: trains the demo's job on plain processes, kills a worker, lets another
join, and photographs the report with a headless Chromium.

    python benchmarks/report_picture.py [--run FOLDER]    # of a run that is there already
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
WIDTH, HEIGHT = 900, 1270
RUN_WITHIN_S, PICTURE_WITHIN_S = 600, 60


def train(out: Path) -> None:
    scenario = out.parent / "one-worker.yaml"
    text = yaml.safe_dump({"faults": [{"at_step": 40, "kill": "worker", "of_rank": 1}]})
    scenario.write_text(text)
    job = str(ROOT / "elastic_ft" / "cli" / "demo.yaml")
    where = ["--processes", "--chaos", str(scenario), "--out", str(out)]
    subprocess.run(
        [sys.executable, "-m", "elastic_ft", "run", job, *where],
        check=True,
        cwd=ROOT,
        timeout=RUN_WITHIN_S,
    )


def photograph(report: Path, picture: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    options = ["--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    subprocess.run(
        [browser, *options, f"--screenshot={picture}", report.absolute().as_uri()],
        check=True,
        capture_output=True,
        timeout=PICTURE_WITHIN_S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a run folder with a report.html")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "report.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = options.run or Path(scratch) / "run"
        if options.run is None:
            train(run)
        photograph(run / "report.html", options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
