"""The pictures of docs/gallery.md: runs on digits, their reports, and screenshots of these in
Chromium.

    python benchmarks/gallery.py [FOLDER]

keeps runs and reports in FOLDER (runs/gallery); those that have finished are not repeated. It needs
Chromium with its driver, selenium and Pillow.
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from setting import GALLERY

from kairosfl.errors import UserError
from kairosfl.report.page import write_report
from kairosfl.runs.sweep import expand, sweep

PICTURES = Path(__file__).parents[1] / "docs" / "assets" / "gallery"
SAVING = "scaffold + budget(share=0.4, by='detector') + average"
ADAPTIVE = "fedcl + alt + pa3fed + fedaware"
STUDIES: dict[str, dict[str, Any]] = {
    "one": {"algorithm": [ADAPTIVE]},
    "six": {"algorithm": ["fedavg", "scaffold"], "seed": [0, 1, 2]},
    "study": {
        "algorithm": ["fedavg", "scaffold", "fedavgm", "budget(share=0.4) + average", SAVING],
        "seed": [0, 1, 2, 3, 4],
    },
    "sweep": {
        "train.lr": [0.02, 0.05, 0.1, 0.2, 0.5],
        "algorithm": ["fedavg", "fedprox(mu=0.1)", "fedprox(mu=1)"],
        "data.alpha": [0.1, 1.0],
    },
    "diverged": {
        "algorithm": ["fedavg", "scaffold", "feddyn(alpha=3)"],
        "train.lr": [0.2, 0.8],
        "seed": [0, 1],
    },
}


def opened() -> webdriver.Chrome:
    """A browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
    ):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


class Camera:
    """Takes pictures of a report, in a window of any width, in light or dark."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.browser = folder, opened()

    def look(
        self, study: str, width: int = 1200, *, dark: bool = False, scale: float = 1.0
    ) -> None:
        """Open the report of a study."""
        size = {"width": width, "height": 900, "deviceScaleFactor": scale, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.browser.get((self.folder / f"{study}.html").absolute().as_uri())
        self.run(
            "document.querySelector('.bar').style.position = 'static'"
        )  # it would cover what is scrolled to

    def run(self, script: str) -> Any:
        """What a line of JavaScript returns."""
        return self.browser.execute_script(script)

    def take(
        self, name: str, first: str = "body", last: str = "", height: int = 0, kind: str = "webp"
    ) -> None:
        """From the top of one element to the end of another, or for this many pixels."""
        while self.run(
            "return page.waiting !== undefined || page.late.length > 0"
        ):  # charts are still to be drawn
            time.sleep(0.02)
        box = "const box = document.querySelector('{}').getBoundingClientRect(); return scrollY + box.{}"
        top = self.run(box.format(first, "top"))
        end = top + height if height else self.run(box.format(last or first, "bottom")) + 4
        width = self.run("return innerWidth")
        clip = {"x": 0, "y": top, "width": width, "height": end - top, "scale": 1}
        shot = self.browser.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "clip": clip, "captureBeyondViewport": True}
        )
        image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        image.save(PICTURES / f"{name}.{kind}", optimize=True, quality=80, method=6)


def main(folder: Path) -> None:
    """Everything, from the runs to the pictures."""
    for name, lists in STUDIES.items():
        with suppress(UserError):  # some of the runs are meant to fail
            sweep(expand({**GALLERY, "sweep": lists}), folder / name)
        write_report([folder / name], folder / f"{name}.html")
    PICTURES.mkdir(parents=True, exist_ok=True)
    camera = Camera(folder)
    try:
        camera.look("study")
        camera.take("report", "body", "#results", kind="png")
        camera.take("clients", "#learning")
        camera.take("cost", "#cost")
        camera.look("one")
        camera.take("one-run", "body", "#results")
        camera.take("inside", "#inside")
        camera.look("six")
        camera.take("six-runs", "body", "#results")
        camera.look("sweep")
        camera.take("sweep", height=920)
        camera.take("heat-map", "#fig-grid")
        camera.run(
            "byId('filter').value = 'alpha=0.1'; byId('filter').dispatchEvent(new Event('input'))"
        )
        camera.run("sort(document.querySelector('#results th[data-name=\"worst clients\"]'), true)")
        camera.take("table", ".finder", "#results")
        camera.look("diverged")
        camera.take("diverged", "body", ".notes")
        camera.look("study", dark=True)
        camera.take("dark", "#result", "#results")
        camera.look("study", 390, scale=2.0)
        camera.take("phone", height=844)
    finally:
        camera.browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/gallery"))
