"""What all charts share: a colour for every kind of work, sizes, fonts, legends, and data as compact records.

The hues are Okabe and Ito's, which people with any of the common colour blindnesses tell apart; calls of one family
(log-probs, training, …) get light and dark shades of one hue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from rlsim.base.charts import drawn, templates

#: Work of the rollout engine, in the order in which it is stacked.
TAIL = "decode in the tail"
ENGINE = {"decode": "#0072B2", TAIL: "#A99FD8", "mixed": "#33508F", "prefill": "#56B4E9", "switch": "#D55E00"}
BUBBLE, WAITING, BUBBLE_COLOUR = "idle (bubble)", "waiting", "#DEDEDE"
#: Shades of the calls, by kind of call.
_FAMILIES = {
    "reward": ("#CC79A7", "#7E3F6B", "#EBC3DA"),
    "inference": ("#009E73", "#9AD6C0", "#00553E", "#B7C94B"),
    "train": ("#E69F00", "#8C510A", "#F0E442"),
    "sync": ("#4A4A4A", "#8C8C8C"),
}
#: Parts of a step; each in the colour of the work that it is made of.
PARTS = {
    "generation": ENGINE["decode"],
    "rewards and log-probs": _FAMILIES["inference"][0],
    "training": _FAMILIES["train"][0],
    "weight sync": _FAMILIES["sync"][0],
    WAITING: BUBBLE_COLOUR,
}
#: Lines of systems; after these a line is grey.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (4, 2), (10, 4), (1, 3))
GREY, CAP, SWITCH = "#9A9A9A", "#B00020", ENGINE["switch"]
#: Slower than the baseline, as fast, faster.
DIVERGING = ("#D55E00", "#FFFFFF", "#2F8FCC")
#: Degrees of tensor parallelism, from 1 up: light to dark.
TP_SHADES = ("#A9CFE8", "#7DB3DA", "#4A90C4", "#1F6CA8", "#0B4A84", "#06224A")
WIDTH = 900  # px of a chart with its labels
INK, FAINT, GRID = "#1C1C1C", "#5A5A5A", "#E4E4E4"
LABEL_LIMIT = 260  # px of a system's name
_TEXT = {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12}
_LINES = {"gridColor": GRID, "domainColor": "#8A8A8A", "tickColor": "#8A8A8A"}
#: What every chart has.
_LOOK: dict[str, Any] = {
    "background": "#FFFFFF",
    "padding": {"left": 4, "right": 14, "top": 4, "bottom": 4},
    "config": {
        "view": {"continuousWidth": 300, "continuousHeight": 300, "stroke": None},
        "axis": {"titleFontWeight": "normal", "labelLimit": LABEL_LIMIT, **_TEXT, **_LINES},
        "legend": {"symbolLimit": 0, **_TEXT},
        "title": {"color": INK, "fontSize": 13, "fontWeight": "bold", "anchor": "start"},
    },
}


def kind_colours(kinds: Iterable[str], calls: pd.DataFrame) -> dict[str, str]:
    """Colours of the kinds of spans, in stacking order, the bubble last; `calls` (the result table) names families."""
    present = set(kinds)
    colours = {kind: colour for kind, colour in ENGINE.items() if kind in present}
    family_of: Mapping[str, str] = dict(zip(calls["call"], calls["kind"], strict=True))
    rest = [call for call in family_of if call in present] + sorted(present - set(family_of) - set(ENGINE))
    for family, shades in _FAMILIES.items():
        members = [kind for kind in rest if family_of.get(kind, "reward") == family]
        colours |= zip(members, shades if len(members) <= len(shades) else _ramp(shades, len(members)), strict=False)
    return colours | {BUBBLE: BUBBLE_COLOUR}


def _ramp(shades: tuple[str, ...], count: int) -> list[str]:
    """`count` different shades from a family's darkest to its lightest."""
    rgb = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in shades]
    first, *_, last = sorted(rgb, key=lambda one: 299 * one[0] + 587 * one[1] + 114 * one[2])
    steps = [i / (count - 1) for i in range(count)]
    return ["#" + "".join(f"{round(a + (b - a) * s):02X}" for a, b in zip(first, last, strict=True)) for s in steps]


def chart(name: str, /, **known: Any) -> dict[str, Any]:
    """A chart of `rlsim/data/vega/report.yaml` over what is `known`, with the report's look."""
    made = part(name, **known)
    fit = {"width": WIDTH, "autosize": {"type": "fit-x", "contains": "padding"}} if made.pop("fit", True) else {}
    return {**_LOOK, **fit, **made}


def part(name: str, /, **known: Any) -> dict[str, Any]:
    """The same without the look, as a panel of another chart."""
    return drawn(templates("report")[name], {**globals(), **known})  # type: ignore[no-any-return]


def by_name(field: str, looks: Mapping[str, Any], *, key: bool = True) -> dict[str, Any]:
    """A channel that gives each name of a column its look, with a legend if `key`."""
    names = list(looks)
    scale = {"domain": names, "range": [*looks.values()]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend(names) if key else None}


def legend(names: list[str]) -> dict[str, Any]:
    """A legend above the chart, in as many columns as there is room for."""
    widest = max((len(name) for name in names), default=1) * 7.5 + 34
    columns = max(min(len(names), int((WIDTH - 60) // widest)), 1)
    return {"orient": "top", "title": None, "columns": columns, "labelLimit": 320}


def bar_height(rows: int) -> int:
    """Height in px of a chart with one bar per system."""
    return max(rows, 2) * (26 if rows <= 12 else 20)


def label_angle(labels: Iterable[str], width: float) -> int:
    """Degrees by which labels below a chart of this width (px) are turned: not at all if they fit beside each other."""
    texts = list(labels)
    longest = max((len(text) for text in texts), default=0)
    return 0 if min(longest * 7, LABEL_LIMIT) + 6 <= width / max(len(texts), 1) else -40
