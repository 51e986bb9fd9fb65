"""The documentation builds as a site without a warning, and the site loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT

WITHOUT = [name for name in ("mkdocs", "material") if find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(WITHOUT), reason=f"needs {', '.join(WITHOUT)}: pip install rlsim[docs]")

#: What a browser fetches by itself; a link that a reader may follow is none of it.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|embed)\b[^>]*?\ssrc\s*=\s*["']?(?P<src>[^"'\s>]+)"""
    r"""|<link\b(?P<link>[^>]*)>"""
    r"""|@import\s+(?:url\()?["']?(?P<import>[^"')\s]+)"""
    r"""|url\(["']?(?P<url>(?!data:)[^"')]+)""",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def loaded(text: str) -> set[str]:
    found = set()
    for match in LOADED.finditer(text):
        if match["link"] is not None:
            kind = re.search(r"""rel\s*=\s*["']?([\w-]+)""", match["link"])
            href = re.search(r"""href\s*=\s*["']?([^"'\s>]+)""", match["link"])
            if href and kind and kind[1] not in ("canonical", "prev", "next", "alternate"):
                found.add(href[1])
        else:
            found.add(match["src"] or match["import"] or match["url"])
    return found


def test_finds_what_a_page_loads() -> None:
    text = """<link rel="stylesheet" href="https://a/x.css"><script src=//b/y.js></script><a href="https://c">c</a>
    <style>@import "https://d/z.css"; p {background: url(https://e/i.png)}</style><link rel="canonical" href="https://f">"""
    assert loaded(text) == {"https://a/x.css", "//b/y.js", "https://d/z.css", "https://e/i.png"}


def test_every_page_is_there(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert files
    outside = {
        f"{path.relative_to(site)}: {target}"
        for path in files
        for target in loaded(path.read_text(encoding="utf-8"))
        if re.match(r"(?:https?:)?//", target)
    }
    assert outside == set()
