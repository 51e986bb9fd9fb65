"""Settings that change nothing, each equal to the digit in all tables of results, beside plain experiments."""

from functools import cache
from typing import Any

import pandas as pd
import pytest
from conftest import cases, tables

import rlsim
from rlsim import RolloutControl
from rlsim.sim.control import RolloutView
from rlsim.workflow.algorithms import grpo
from rlsim.workflow.graph import Workflow

TABLES = tables("neutral")
BASES: dict[str, dict[str, Any]] = TABLES["bases"] | TABLES["special"]


class Looks(RolloutControl):
    """Has a timer, and never does anything."""

    every_s = 0.5

    def on_timer(self, view: RolloutView) -> None:
        view.replicas()


def unrewarded(**_: object) -> Workflow:
    return grpo(reference=False).without(["reward"])


def results(base: str, part: object = None, **changes: object) -> dict[str, pd.DataFrame]:
    experiment = {"name": base, **TABLES["common"], **BASES[base]}
    if part is not None:
        experiment["systems"] = [{"name": "verl", "use": [*experiment["systems"], part]}]
    result = rlsim.run(experiment, overrides=changes)
    names = ("steps", "calls", "responses", "stays", "spans", "switches")
    return {name: getattr(result, name) for name in names}


@cache
def plain(base: str) -> dict[str, pd.DataFrame]:
    return results(base)


def same(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame], most: float) -> None:
    """But for the label of a round."""
    for name, table in one.items():
        table, known = other[name].drop(columns="round", errors="ignore"), table.drop(columns="round", errors="ignore")
        pd.testing.assert_frame_equal(table, known, check_exact=not most, rtol=most, atol=most, obj=name)


@cases("neutral", "a setting that means nothing changes nothing")
def test_a_setting_that_means_nothing_changes_nothing(key: str, value: object, base: str, most: float) -> None:
    same(plain(base), results(base, **{key: value}), most)


@pytest.mark.parametrize("base", TABLES["also"])
def test_settings_at_their_defaults_change_nothing(base: str) -> None:
    same(plain(base), results(base, **TABLES["at once"], **TABLES["also"][base]), 0.0)


@pytest.mark.parametrize("part", TABLES["idle"])
@pytest.mark.parametrize("base", ["dense", "pipelined"])
def test_a_part_that_does_nothing_changes_nothing(base: str, part: str) -> None:
    same(plain(base), results(base, part=TABLES["idle"][part]), 0.0)


def test_a_reward_of_no_time_is_as_none_at_all() -> None:
    scored, unscored = plain("unscored"), results("unscored", **{"workflow.algorithm": f"{__name__}:unrewarded"})
    calls = scored["calls"].query("call != 'reward'").reset_index(drop=True)
    of_rewards = ["score_start_at", "scored_at", "reward"]
    one, other = (table["responses"].drop(columns=of_rewards) for table in (scored, unscored))
    same({**scored, "calls": calls, "responses": one}, {**unscored, "responses": other}, 0.0)
