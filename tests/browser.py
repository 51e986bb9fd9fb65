"""Opens a page in a headless browser that is installed here, and says what became of it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")


class Opened(NamedTuple):
    """A page after its scripts have run."""

    dom: str
    console: list[str]  # every message on its console: errors and warnings among them

    def charts(self) -> dict[str, str]:
        """Each chart's container, from its beginning to the caption, by the chart's id."""
        parts = re.findall(r'<div class="chart[^>]*?id="chart-([^"]+)".*?<figcaption>', self.dom, re.DOTALL)
        texts = re.findall(r'<div class="chart[^>]*?id="chart-[^"]+".*?<figcaption>', self.dom, re.DOTALL)
        return dict(zip(parts, texts, strict=True))

    def undrawn(self) -> list[str]:
        """Charts without a picture, or without a single mark in it."""
        mark = re.compile(r'class="mark-\w+ role-mark[^"]*"[^>]*><(path|line|text) [^>]*(d="M|x2=|transform=)')
        return [
            name
            for name, text in self.charts().items()
            if 'data-drawn="yes"' not in text or "<svg" not in text or not mark.search(text)
        ]


def open_page(path: Path, folder: Path) -> Opened:
    """The page as headless Chromium or Chrome sees it; skips the test where neither is installed."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser to open the page in: none of {', '.join(BROWSERS)} is installed")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", f"--user-data-dir={folder}", "--virtual-time-budget=60000"),
            *("--window-size=1280,1000", "--dump-dom", path.resolve().as_uri()),
        ],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return Opened(done.stdout, re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", done.stderr))
