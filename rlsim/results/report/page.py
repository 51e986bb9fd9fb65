"""A page: sections of text, charts and tables, written as one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlsim.base.charts import OFFLINE, chart_spec, vega_script
from rlsim.base.formats import Table
from rlsim.base.output import check_own_file, write_text
from rlsim.base.reading import shipped
from rlsim.base.refusals import refuse, said, text_of
from rlsim.base.version import __version__


@dataclass(frozen=True)
class Figure:
    """A chart (Vega-Lite) with its title and a caption that says how to read it; `id` names its picture."""

    id: str
    title: str
    chart: Any
    caption: str
    form: ClassVar[str] = "figure"


def figure(name: str, chart: Any, own: str = "", /, **known: Any) -> Figure:
    """A chart under the title and over the caption that `rlsim/data/report.yaml` has for that name; its `own` name."""
    told = shipped("report.yaml")[name]
    return Figure(own or name, text_of(told["title"], known), chart, " ".join(said(told["caption"], **known)))


@dataclass(frozen=True)
class Text:
    """A paragraph; or a smaller `heading`, the paragraphs of a `list`, text that is shown as it is (`code`)."""

    text: str | Sequence[str]
    form: Literal["text", "heading", "list", "code"] = "text"
    label: str = ""  # of code


Block = Figure | Table | Text


@dataclass(frozen=True)
class Section:
    """A heading of the table of contents, and what stands below it."""

    id: str
    title: str
    blocks: tuple[Block, ...]


def sections_of(*rows: tuple[str, str, Iterable[Block]]) -> tuple[Section, ...]:
    """Sections by id, title and blocks, without those that have none."""
    sections = (Section(id, title, tuple(blocks)) for id, title, blocks in rows)  # noqa: A001 - what it is
    return tuple(one for one in sections if one.blocks)


@dataclass(frozen=True)
class Page:
    """A title, what was found in a few sentences, and the sections."""

    title: str
    description: str
    findings: tuple[str, ...]
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...] = field(default=())  # a line below the title: name and value

    @property
    def figures(self) -> list[Figure]:
        """Every chart, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]

    def html(self) -> str:
        """The page as HTML; whatever came from the user is escaped."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        specs = {figure.id: chart_spec(figure.chart) for figure in self.figures}
        return environment.get_template("page.html").render(
            page=self, specs=specs, vega=vega_script(), policy=OFFLINE, version=__version__
        )

    def write(self, path: Path) -> None:
        """Write the page, whole or not at all; raises `ConfigError` if that is not possible."""
        check_page_path(path)
        write_text(path, self.html())


def check_page_path(path: Path) -> None:
    """Raises `ConfigError` if a page cannot be written there."""
    refuse("page", path=path)
    check_own_file(path)


@dataclass(frozen=True)
class CaseSetup:
    """One case of an experiment: its name (empty if there are no cases), its id in the page, what it ran on."""

    case: str
    id: str  # appended to the ids of its charts; empty if there are no cases
    cluster: str
    gpus: int
    gpus_per_node: int
    model: str
    cap_tokens: int
    batch: int  # responses that a step is to train on
    calibrations: Sequence[Mapping[str, Any]]  # one for each kind of GPU

    def named(self, what: str) -> str:
        return f"{what}: {self.case}" if self.case else what

    def figure(self, name: str, chart: Any, /, **known: Any) -> Figure:
        made = figure(name, chart, **known)
        return replace(made, id=f"{name}-{self.id}" if self.id else name, title=self.named(made.title))


def setups_of(*manifests: Mapping[str, Any]) -> list[CaseSetup]:
    """Every case of these results in which something ran, in order."""
    setups: list[CaseSetup] = []
    ids: set[str] = set()
    for manifest in manifests:
        for case, record in manifest["setups"].items():
            if manifest["systems"][case]:
                known = {field.name: record[field.name] for field in fields(CaseSetup) if field.name in record}
                known["calibrations"] = calibrations_of(record)
                setups.append(CaseSetup(case=case, id=unique_slug(case, ids), **known))
    return setups


def calibrations_of(setup: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calibrations in a case's part of a manifest, one for each kind of GPU."""
    found = setup["calibration"]
    return found if isinstance(found, list) else [found]


def unique_slug(text: str, taken: set[str]) -> str:
    """`text` as it may stand in a file name or an id, told apart from those in `taken`, to which it is added."""
    base = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or ("x" if text else "")
    slug, count = base, 2
    while slug in taken:
        slug, count = f"{base}-{count}", count + 1
    taken.add(slug)
    return slug
