"""The one sentence that says what to do, and the settings of veRL to change for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from rlsim.formats import is_missing, rate
from rlsim.verl.overrides import changed


class Headline(NamedTuple):
    """What to do, and how in veRL: a sentence, and `key=value` lines to paste (none if nothing is to be changed)."""

    text: str
    how: str
    changes: tuple[str, ...]


def headline(
    ranked: pd.DataFrame,
    baseline: str,
    settings: Mapping[str, dict[str, Any] | None],
    lines: Mapping[str, str] = MappingProxyType({}),
) -> Headline:
    """The headline of a ranking; `settings` are veRL's for each system, None where veRL has none for it.

    `lines` are systems that train on what older weights have generated, as lines of `systems` of an experiment.
    """
    rows = ranked[ranked["comparable"] & (ranked["same_as"].eq("") | ranked["system"].eq(baseline))].to_dict("records")
    if not rows:
        return Headline("Keep what is there: no system could be compared with it yet; ask with more --steps", "", ())
    own = next((row for row in rows if row["system"] == baseline), None)
    if own is None:
        return Headline(f"Nothing to advise yet: {baseline} holds back prompts; ask with more --steps", "", ())
    if not _gains(rows[0]):
        doubt = "chance" if is_missing(rows[0]["speedup_model_low"]) else "chance and the calibration's errors"
        close = "" if rows[0] is own else f", not even {_gain(rows[0], own)}"
        keep = f"Keep {baseline}: nothing that was tried gains on its throughput beyond {doubt}{close}"
        return Headline(keep, "", ())
    best, now = rows[0], settings.get(baseline) or {}
    name = f"{best['system']} ({best['tuned']})" if best["tuned"] else str(best["system"])
    text = f"Run {name}: {_gain(best, own)}"
    if is_missing(best["speedup_low"]):
        text += "; one seed cannot tell that from chance: ask with more --seeds before you spend on it"
    if best["system"] in lines:
        stale = f"{text}; it trains on responses up to {best['staleness']} updates old"
        return Headline(stale, "It is this line of an experiment's `systems`:", (lines[best["system"]],))
    wanted = settings.get(best["system"])
    if wanted is not None:
        return Headline(text, "Change these settings of veRL:", changed(now, wanted))
    without = f"veRL has no switch for {best['system']}: it would have to be built in."
    within = next((row for row in rows if settings.get(row["system"]) is not None and _gains(row)), None)
    if within is None:
        return Headline(text, f"{without} With veRL's own settings nothing gains: leave them.", ())
    how = f"{without} With veRL's own settings, {within['system']} has {_gain(within, own)}; change these:"
    return Headline(text, how, changed(now, settings[within["system"]] or {}))


def _gains(row: Mapping[Any, Any]) -> bool:
    """Whether a system is faster than the baseline beyond chance and the calibration's errors, as far as these are
    known; with one seed and no draws, whether it is faster."""
    lowest = [row[end] for end in ("speedup_low", "speedup_model_low") if not is_missing(row[end])]
    return bool(min(lowest, default=row["speedup"]) > 1.0)


def _gain(row: Mapping[Any, Any], own: Mapping[Any, Any]) -> str:
    """The speedup over the baseline with its intervals, and both throughputs, as text."""
    low, high = row["speedup_low"], row["speedup_high"]
    interval = "" if is_missing(low) else f", 95% interval {low:.2f} to {high:.2f}"
    least, most = row["speedup_model_low"], row["speedup_model_high"]
    interval += "" if is_missing(least) else f", {least:.2f} to {most:.2f} over the calibration's errors"
    rates = f"{rate(row['responses_per_s'])} against {rate(own['responses_per_s'])} responses trained on per second"
    return f"{row['speedup']:.2f} times the throughput of {own['system']} ({rates}{interval})"
