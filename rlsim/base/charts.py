"""Charts from templates in Vega-Lite, and as files: pages that load nothing, SVG and PNG."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsim.base.catalogue import DATA
from rlsim.base.output import GENERATOR, PNG_MARK, SVG_MARK, atomic_path
from rlsim.base.reading import shipped
from rlsim.base.refusals import code_of, refuse
from rlsim.errors import ConfigError, RlsimError, printable

if TYPE_CHECKING:
    import pandas as pd

CHART_SUFFIXES = (".html", ".svg", ".png")
_PNG_HEAD_BYTES = 33
_DIGITS = 6
#: A page that holds everything it needs.
OFFLINE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.4.1.json"
#: A field of the data, and its type.
_FIELD = re.compile(r"([\w ]+):([QN])")
_TYPES = {"Q": "quantitative", "N": "nominal"}


def templates(name: str) -> dict[str, Any]:
    """The charts of a table of `rlsim/data/vega`, whose heads say how they are written."""
    return shipped(f"vega/{name}.yaml")  # type: ignore[no-any-return]


def drawn(template: Any, known: Mapping[str, Any]) -> Any:
    """A template with the values of its expressions over what is `known`, and `rows`."""
    if isinstance(template, str):
        if template.startswith("="):
            return eval(code_of(template[1:].strip()), {"rows": rows, **known})
        found = _FIELD.fullmatch(template)
        return {"field": found[1], "type": _TYPES[found[2]]} if found else template
    if isinstance(template, list):
        there = (
            one for one in template if not isinstance(one, dict) or eval(code_of(one.get("if", "True")), {**known})
        )
        return [drawn(one, known) for one in there]
    if not isinstance(template, dict):
        return template
    of = drawn(template["of"], known) if "of" in template else {}
    of = drawn(of, known) if isinstance(of, str) else of
    items = ((key, drawn(value, known)) for key, value in template.items() if key not in ("of", "if"))
    return {**of, **{key: value for key, value in items if value is not ...}}


def rows(frame: pd.DataFrame) -> dict[str, Any]:
    """A frame as a chart has it, floats with six significant digits: finer than any pixel, and half the bytes."""
    rounded = {
        str(name): column.map(lambda value: float(f"{value:.{_DIGITS}g}"), na_action="ignore")
        for name, column in frame.items()
        if column.dtype.kind == "f"
    }
    told = frame.assign(**rounded).astype(object)
    return {"values": told.where(told.notna(), None).to_dict("records")}


def check_chart_path(path: Path, error: type[RlsimError] = ConfigError) -> None:
    """Raises `error` if a chart cannot be written as such a file."""
    refuse("chart", error, path=path, known=CHART_SUFFIXES, draws=find_spec("vl_convert") is not None)


def save_chart(figure: Any, path: Path, error: type[RlsimError] = ConfigError) -> None:
    """A chart as .html (which holds everything it needs), .svg or .png; raises `error` for another ending."""
    check_chart_path(path, error)
    with atomic_path(path, error) as temporary:
        if path.suffix == ".html":
            temporary.write_text(_chart_page(figure), encoding="utf-8")
        else:
            import vl_convert

            spec = chart_spec(figure)
            if path.suffix == ".svg":
                svg = vl_convert.vegalite_to_svg(spec).replace(">", f">{SVG_MARK.decode()}", 1)
                temporary.write_text(svg, encoding="utf-8")
            else:  # a chunk of text after the signature and the header
                png = vl_convert.vegalite_to_png(spec, scale=2)
                text = b"tEXt" + PNG_MARK
                chunk = struct.pack(">I", len(PNG_MARK)) + text + struct.pack(">I", zlib.crc32(text))
                temporary.write_bytes(png[:_PNG_HEAD_BYTES] + chunk + png[_PNG_HEAD_BYTES:])


def chart_spec(figure: Any) -> Any:
    """A chart as Vega-Lite, data that it has more than once only once, its texts printable.

    A control character in one ends the process that draws it.
    """
    datasets: dict[str, Any] = {}

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            made = {clean(key): clean(item) for key, item in value.items()}
            if [*made] != ["values"]:
                return made
            name = f"data-{zlib.crc32(json.dumps(made).encode()):08x}"
            datasets[name] = made["values"]
            return {"name": name}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return printable(value) if isinstance(value, str) else value

    return {"$schema": _SCHEMA, **clean(figure), "datasets": datasets}


def _chart_page(figure: Any) -> str:
    """A page with one chart; no text in the chart can end the script that it stands in."""
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(
        Path(__file__).with_name("chart.html").read_text(encoding="utf-8")
    )
    return template.render(spec=chart_spec(figure), vega=vega_script(), policy=OFFLINE, generator=GENERATOR)


def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, once for all charts; it cannot end its own element."""
    return (DATA / "vega" / "vega.js").read_text(encoding="utf-8")
