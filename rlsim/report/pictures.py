"""Every chart of a page as a picture of its own."""

from __future__ import annotations

from pathlib import Path

from rlsim.errors import ConfigError
from rlsim.output import save_chart
from rlsim.report.page import Page


def check_pictures_folder(folder: Path) -> None:
    """Raises `ConfigError` if pictures cannot be put there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; give a folder for the pictures")


def write_pictures(page: Page, folder: Path, suffix: str) -> list[Path]:
    """One file per chart, named after it, `.png` (two pixels a point) or `.svg`; the folder is made if need be."""
    check_pictures_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from None
    paths = [folder / f"{figure.id}{suffix}" for figure in page.figures]
    for figure, path in zip(page.figures, paths, strict=True):
        save_chart(figure.chart, path)
    return paths
