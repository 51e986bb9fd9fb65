"""Every chart of a page as a picture of its own."""

from __future__ import annotations

from pathlib import Path

from rlsim.charts import save_chart
from rlsim.errors import ConfigError
from rlsim.output import check_own_file
from rlsim.report.page import Figure, Page


def check_pictures_folder(folder: Path) -> None:
    """Raises `ConfigError` if pictures cannot be put there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; give a folder for the pictures")


def check_pictures(page: Page, folder: Path, suffix: str) -> dict[Path, Figure]:
    """The files that `write_pictures` writes; raises `ConfigError` if one is there that rlsim did not write."""
    check_pictures_folder(folder)
    files = {folder / f"{figure.id}{suffix}": figure for figure in page.figures}
    for path in files if folder.is_dir() else ():
        check_own_file(path)
    return files


def write_pictures(page: Page, folder: Path, suffix: str) -> list[Path]:
    """One file per chart, named after it, `.png` (two pixels a point) or `.svg`; the folder is made if need be."""
    files = check_pictures(page, folder, suffix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from None
    for path, figure in files.items():
        save_chart(figure.chart, path)
    return list(files)
