"""Charts as files: pages that load nothing, SVG and PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlsim.base.catalogue import DATA
from rlsim.base.output import GENERATOR, PNG_MARK, SVG_MARK, atomic_path
from rlsim.errors import ConfigError, RlsimError, printable

CHART_SUFFIXES = (".html", ".svg", ".png")
_PNG_HEAD_BYTES = 33
#: A page that holds everything it needs.
OFFLINE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def check_chart_path(path: Path, error: type[RlsimError] = ConfigError) -> None:
    """Raises `error` if a chart cannot be written as such a file."""
    if path.suffix not in CHART_SUFFIXES:
        raise error(f"{path}: a chart is written as one of {', '.join(CHART_SUFFIXES)}")
    if path.suffix != ".html" and find_spec("vl_convert") is None:
        raise error(f"{path}: pictures need vl-convert: pip install 'rlsim[charts]'; .html needs nothing more")


def save_chart(figure: Any, path: Path, error: type[RlsimError] = ConfigError) -> None:
    """An Altair chart as .html (which holds everything it needs), .svg or .png; raises `error` for another ending."""
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
    """An Altair chart as Vega-Lite, its texts printable: a control character in one ends the process that draws it."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {clean(key): clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return printable(value) if isinstance(value, str) else value

    return clean(figure.to_dict())


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
