"""Experiments of parts that do not go together: each is refused with the reason, by an error of its kind."""

from typing import Any

import pytest
from conftest import tables

import rlsim
from rlsim import errors

ROWS = [
    pytest.param(tables("bases").get(str(topic["experiment"]), topic["experiment"]), *row, id=f"{name}: {row[2]}")
    for name, topic in tables("refusals").items()
    for row in topic.get("refused", ())
]


@pytest.mark.parametrize(("experiment", "use", "changes", "told", "kind"), ROWS)
def test_what_does_not_go_together_is_refused(
    experiment: dict[str, Any], use: list[Any] | None, changes: dict[str, Any], told: str, kind: str
) -> None:
    systems = experiment.get("systems") if use is None else [{"name": "wrong", "use": use}]
    whole = {key: value for key, value in changes.items() if "." not in key}
    parts = {key: value for key, value in changes.items() if "." in key}
    with pytest.raises(getattr(errors, kind), match=told):
        rlsim.run({**experiment, "systems": systems, **whole}, overrides=parts)
