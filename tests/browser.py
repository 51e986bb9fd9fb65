"""Opens a page in a headless browser that is installed here, and checks what became of it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")


def opened(path: Path, folder: Path) -> str:
    """The page after its scripts have run in Chromium or Chrome without a word on the console; skips the test where
    neither is installed."""
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
    assert re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", done.stderr) == []
    return done.stdout


def drawn(path: Path, folder: Path) -> set[str]:
    """The charts of a page, each of which has a picture with a mark in it."""
    container = re.compile(r'(<div class="chart[^>]*?id="chart-([^"]+)".*?)<figcaption>', re.DOTALL)
    charts = {name: text for text, name in container.findall(opened(path, folder))}
    mark = re.compile(r'class="mark-\w+ role-mark[^"]*"[^>]*><(path|line|text) [^>]*(d="M|x2=|transform=)')
    whole = {
        name for name, text in charts.items() if 'data-drawn="yes"' in text and "<svg" in text and mark.search(text)
    }
    assert set(charts) == whole
    return whole
