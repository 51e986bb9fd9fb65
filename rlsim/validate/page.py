"""The page `docs/validation.md`: one section a part, each between markers, so that a part can be run anew alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlsim.errors import ConfigError
from rlsim.output import atomic_path, check_file, write_text
from rlsim.reading import read_text
from rlsim.validate.bounds import checked
from rlsim.validate.parts import PARTS, Section
from rlsim.validate.published import filled_text
from rlsim.validate.rows import markdown

TITLES = {
    "transfer": "Trust that transfers: settings that no fit has seen",
    "kernels": "Kernels at shapes that no fit has seen",
    "serving": "Whole engines: closed-loop serving",
    "rollout": "Real rollouts",
    "weight_sync": "Published weight syncs",
    "pat": "Published figures: PAT",
    "rollpacker": "Published figures: RollPacker and RLHFuse",
    "oppo": "Published figures: OPPO",
    "real": "Published figures: REAL",
    "steps": "Measured steps of real runs",
    "asynchronous": "Measured steps of asynchronous trainers",
    "sensitivity": "What the published figures depend on",
}


def _chart(name: str) -> str:
    """The chart of a part, from the page's folder."""
    return f"validation/{name}.png"


def section_text(name: str, section: Section) -> str:
    """A part as it stands on the page: its text, its chart, and its bounds."""
    parts = [f"## {TITLES[name]}\n", section.text.strip() + "\n"]
    if section.chart is not None:
        parts.append(f"![{TITLES[name]}]({_chart(name)})\n")
    bounds = []
    for summary, bound, value, fine in checked(section.summaries):
        limit = f"{bound.limit:.1%}" + ("" if fine else " **exceeded**")
        bounds.append((summary.group, summary.quantity, bound.statistic, f"{value:.1%}", limit, bound.missed))
    if bounds:
        headings = ("what", "quantity", "of the errors", "now", "bound", "where a target is missed: why")
        parts += ["Bounds:\n", markdown(headings, bounds)]
    return "\n".join(parts)


def read_sections(page: Path) -> dict[str, str]:
    """The sections of a page by part, none if there is no such file. Raises `ConfigError` if it cannot be read."""
    return read_page(page) if page.exists() else {}


def read_page(page: Path) -> dict[str, str]:
    """The sections of a page that is there. Raises `ConfigError` if it cannot be read."""
    text = read_text(page)
    found = re.findall(r"^<!-- part: (\w+) -->\n(.*?)^<!-- end -->$", text, re.MULTILINE | re.DOTALL)
    if not found and text:
        raise ConfigError(f"{page}: not a validation page (no `<!-- part: ... -->` in it)")
    return dict(found)


def page_text(sections: Mapping[str, str]) -> str:
    """The whole page from its sections, in the parts' order."""
    marked = [f"<!-- part: {name} -->\n{sections[name]}<!-- end -->\n" for name in PARTS if name in sections]
    return "\n".join([filled_text("introduction"), *marked])


def check_page(page: Path, parts: Iterable[str]) -> None:
    """Raises `ConfigError` if the page, or the chart of one of these parts, cannot be written, or is something else."""
    check_file(page)
    sections = read_sections(page)
    for chart in (page.parent / _chart(name) for name in parts if _chart(name) not in sections.get(name, "")):
        if chart.exists():
            raise ConfigError(f"{chart}: exists, and {page} does not show it; move it away or give another page")


def write_page(page: Path, sections: Mapping[str, Section]) -> None:
    """Put these parts on the page and keep the others that stand there; charts go to `validation/` beside it."""
    check_page(page, sections)
    texts = read_sections(page) | {name: section_text(name, section) for name, section in sections.items()}
    for name, section in sections.items():
        if section.chart is not None:
            (page.parent / _chart(name)).parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(page.parent / _chart(name)) as path:
                section.chart.save(path, format="png", scale_factor=1.5)
    write_text(page, page_text(texts))


def stale(page: Path, sections: Mapping[str, Section], repeatable: Iterable[str]) -> list[str]:
    """The repeatable parts whose section is not what would be written now, and parts that are not on the page."""
    written = read_sections(page)
    changed = [
        name for name in repeatable if name in sections and written.get(name) != section_text(name, sections[name])
    ]
    return list(dict.fromkeys([*changed, *(name for name in PARTS if name not in written)]))
