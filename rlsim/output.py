"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rlsim.errors import ConfigError, RlsimError, printable

CHART_SUFFIXES = (".html", ".svg", ".png")

#: Names in files are anyone's: what a chart shows stands in a script as JSON without `<`, `>` and `&` (`tojson`), Vega
#: interprets expressions instead of compiling them (`ast`), and the page may load nothing.
_CHART_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy|safe }}">
<title>rlsim chart</title>
<script>
{{ vega|safe }}
</script>
</head>
<body>
<div id="chart"></div>
<script>
vegaEmbed("#chart", {{ spec|tojson }}, {ast: true, renderer: "svg"}).catch(console.error);
</script>
</body>
</html>
"""
#: A page that holds everything it needs.
OFFLINE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


@contextmanager
def atomic_path(path: Path, error: type[RlsimError] = ConfigError) -> Iterator[Path]:
    """A temporary path beside `path`, moved onto it when the block ends well and removed when it does not.

    Raises `error` for a folder that does not exist or cannot be written to.
    """
    check_folder(path, error)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
    except OSError as problem:
        raise error(f"{path}: cannot be written: {problem.strerror}") from None
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as problem:
        raise error(f"{path}: cannot be written: {problem.strerror or problem}") from None
    finally:
        temporary.unlink(missing_ok=True)


def results_folder(name: str) -> Path:
    """Where the results of an experiment or sweep of that name go if nothing else is said: a folder in `results`."""
    return Path("results") / (re.sub(r"[/\\]+", "-", name).lstrip(".") or "unnamed")


def check_folder(path: Path, error: type[RlsimError] = ConfigError) -> None:
    """Raises `error` if there is no folder for such a file, or a folder in its place."""
    if not path.parent.is_dir():
        raise error(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise error(f"{path}: is a folder; give a file name")


def check_chart_path(path: Path, error: type[RlsimError] = ConfigError) -> None:
    """Raises `error` if a chart cannot be written as such a file."""
    if path.suffix not in CHART_SUFFIXES:
        raise error(f"{path}: a chart is written as one of {', '.join(CHART_SUFFIXES)}")


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
                temporary.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
            else:
                temporary.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))


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

    template = Environment(autoescape=True).from_string(_CHART_PAGE)
    return template.render(spec=chart_spec(figure), vega=vega_script(), policy=OFFLINE)


@cache
def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, once for all charts; it cannot end its own element."""
    import vl_convert

    return (
        str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
        .replace("</script", "<\\/script")
        .replace("<!--", "<\\!--")
    )
