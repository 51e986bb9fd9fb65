"""What to do: the verdict on a ranking, and what to change for it in the words of the user's framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from rlsim.experiment.systems import SystemSpec
from rlsim.frameworks.keys import Keys
from rlsim.results.comparison.verdict import Verdict, judge


class Headline(NamedTuple):
    """What to do, and how: two texts, and lines to paste (none if nothing is to be changed)."""

    text: str
    how: str
    changes: tuple[str, ...]


def settings_of(keys: Keys, specs: Mapping[str, SystemSpec], baseline: str) -> dict[str, tuple[str, ...]]:
    """What to change for every system that the user's framework has settings for, by name."""
    changes = {name: keys.changes(specs[baseline], spec) for name, spec in specs.items() if name != baseline}
    return {name: lines for name, lines in changes.items() if lines is not None}


def headline(
    ranked: pd.DataFrame, baseline: str, keys: Keys, specs: Mapping[str, SystemSpec], over: str = ""
) -> Headline:
    """The headline of a ranking of `specs`; `over` says why the baseline itself is not allowed, if it is not."""
    verdict = judge(ranked, baseline)
    tuned = {row["system"]: row["tuned"] for row in ranked.to_dict("records") if row["tuned"]}
    said = " ".join(verdict.sentences(tuned))
    known = verdict.runner_up
    if baseline not in verdict.outcomes or verdict[baseline].why or known is None or known.why:
        return Headline(f"Nothing to advise yet. {said}", "Ask with more --steps.", ())
    settings = settings_of(keys, specs, baseline)
    whose = keys.framework or "the experiment"
    allowed = [row for row in verdict.rows if row.system != baseline and not row.why] if over else list(verdict.faster)
    within = next((row for row in allowed if row.system in settings), None)
    kept = f"{baseline} itself is not allowed: {over}. " if over else ""
    if within is None:
        built = ""
        if allowed:
            built = f"{whose} has no settings for {allowed[0].system}: it would have to be built in. "
        keep = "" if over else f"Keep the settings of {whose}. " if allowed else f"Keep {baseline}. "
        return Headline(f"{kept}{keep}{said}", f"{built}{_tried(settings, verdict, keys)}", ())
    text = f"{kept}Run {within.system}: {verdict.gain(within, tuned)}."
    if within is not allowed[0]:
        best = allowed[0]
        text += f" {best.system} would have {verdict.gain(best, tuned)}, but {whose} has no settings for it."
    how = f"Change these settings of {keys.framework}:" if keys.framework else "It is this line of `systems`:"
    return Headline(text, how, settings[within.system])


def _tried(settings: Mapping[str, tuple[str, ...]], verdict: Verdict, keys: Keys) -> str:
    """Which settings the verdict is about."""
    found: dict[str, list[str]] = {}
    for name in settings:
        for line in settings[name] if name in verdict.outcomes and keys.framework else ():
            key, _, value = line.partition("=")
            if value not in found.setdefault(key, []):
                found[key].append(value)
    tried = "; ".join(f"{key} = {', '.join(values)}" for key, values in found.items())
    what = f"Of its settings these were tried, and no others: {tried}." if tried else ""
    return what or f"{len(verdict.rows) - 1} other systems were tried, and no other settings."
