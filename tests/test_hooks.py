"""Whatever a policy's hooks raise or return amiss ends in one message: the system, the hook, the file and its line."""

import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import LENGTHS, TINY, Command, Failing, cases, edited, tables

import rlsim
from rlsim.base.hooks import hooks, overridden
from rlsim.base.schema import Schema
from rlsim.errors import PolicyError
from rlsim.experiment.testing import ContractError, check_policy
from rlsim.policies.parts import KINDS, ChunkStreaming
from rlsim.sim.batching import Batching, PromptFeed
from rlsim.sim.control import RolloutControl

#: Hooks that a plain run calls: the kind of part, the hook with its parameters, and what else the part needs.
CALLED = tables("hooks")["called by a plain run"][1:]
NO_VALUE = {"setup", "put_back", "observe"}  # their values do not matter


def write(folder: Path, name: str, kind: str, hook: str, body: str, rest: str = "") -> str:
    """A policy `Mine` whose hook stands in line 6, and an experiment with it."""
    text = f"from rlsim.policies.parts import *\nfrom rlsim import *\n\n\nclass Mine({kind}):\n"
    text += textwrap.indent(f"def {hook}:\n    {body}\n{rest}\n", "    ")
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    head, *rows = LENGTHS.splitlines()
    (folder / "lengths.csv").write_text("\n".join([f"{head},reward", *(f"{row},1" for row in rows), ""]))
    return edited(("  - pat", f"  - {name}:Mine"), ("steps: 1", "steps: 2"))


@pytest.mark.parametrize(("kind", "hook", "rest"), CALLED)
def test_a_hook_that_raises(failing: Failing, kind: str, hook: str, rest: str) -> None:
    name = hook.partition("(")[0]
    module = f"raises_{kind}_{name}".lower()
    message = failing(base=write(failing.folder, module, kind, hook, "return {}['gone']", rest))
    line = f"{module}.py:7: KeyError: 'gone' (line 7: return {{}}['gone'])"
    assert message == f"base.yaml:10:5: system 'mine': Mine.{name}: {line}"


@pytest.mark.parametrize(("kind", "hook", "rest"), [one for one in CALLED if one[1].partition("(")[0] not in NO_VALUE])
def test_a_hook_that_returns_nonsense(failing: Failing, kind: str, hook: str, rest: str) -> None:
    name = hook.partition("(")[0]
    module = f"nonsense_{kind}_{name}".lower()
    message = failing(base=write(failing.folder, module, kind, hook, "return 1j", rest))
    assert message.startswith(f"base.yaml:10:5: system 'mine': Mine.{name}: {module}.py:6: returned 1j, expected ")
    assert message.endswith(f" (line 6: def {hook}:)")


@pytest.mark.parametrize(("kind", "hook", "near"), [("RolloutControl", "on_finished", "on_finish"),
                                                    ("Batching", "lanch", "launch")])  # fmt: skip
def test_a_misspelt_hook_is_refused(failing: Failing, kind: str, hook: str, near: str) -> None:
    message = failing(base=write(failing.folder, f"misspelt_{hook}", kind, f"{hook}(self, view)", "return None"))
    assert f"Mine.{hook}: misspelt_{hook}.py:6: is no hook; did you mean '{near}'?" in message


def test_methods_of_the_authors_own_may_have_other_names() -> None:
    class Fine(RolloutControl):
        def _on_finished(self) -> None: ...
        def helper(self) -> None: ...

    assert overridden(Fine) == []
    with pytest.raises(PolicyError, match=r"Bad.on_the_whole: .* is no hook: .*on_finish, on_scored, on_timer"):
        type("Bad", (RolloutControl,), {"on_the_whole": lambda self: None, "__module__": __name__})


def test_what_is_named_as_a_hook_and_is_none_is_refused() -> None:
    def made(*bases: type, **members: Any) -> type:
        return type("Mine", bases, {"__module__": __name__, **members})

    for value in (-1.0, 0, math.nan, "5s"):
        with pytest.raises(PolicyError, match=r"Mine\.every_s: is .*, expected a number of seconds above 0, or None"):
            made(RolloutControl, every_s=value)
    with pytest.raises(PolicyError, match=r"Mine\.length_error: is '0\.1', expected a number, 0 or more"):
        made(RolloutControl, length_error="0.1")
    with pytest.raises(PolicyError, match=r"Mine\.on_timer: is None, expected"):
        made(RolloutControl, on_timer=None)
    assert made(RolloutControl, every_s=0.5)().every_s == 0.5
    with pytest.raises(PolicyError, match=r"Mine\.every_s: is a hook, and can be no parameter"):
        made(Schema, RolloutControl, __annotations__={"every_s": "float"}, every_s=30.0)


@cases("hooks", "more nonsense")
def test_more_nonsense(failing: Failing, kind: str, hook: str, body: str, message: str) -> None:
    module = f"more_{abs(hash((hook, body)))}"
    told = failing(base=write(failing.folder, module, kind, hook, body))
    assert told.startswith(f"base.yaml:10:5: system 'mine': Mine.{hook.partition('(')[0]}: {module}.py:")
    assert message in told


@cases("hooks", "a degree that the model has not")
def test_a_degree_that_the_model_has_not(failing: Failing, cluster: str, hook: str, body: str, message: str) -> None:
    base = write(failing.folder, f"degree_{cluster[0]}", "RolloutControl", hook, body)
    told = failing(base=base.replace("8xh100", cluster).replace("tp: 4", "tp: 2"))
    assert told.startswith(f"base.yaml:10:5: system 'mine': Mine.{hook.partition('(')[0]}: ")
    assert message in told
    assert "setup" in hook or told.endswith("; feasible: TP 1, 2")


def test_the_part_that_wanted_an_action_is_named(failing: Failing) -> None:
    text = write(failing.folder, "blamed_first", "RolloutControl", "on_finish(self, view)", "return Abort((99,))")
    write(failing.folder, "innocent", "RolloutControl", "on_finish(self, view)", "return None")
    both = text.replace("  - blamed_first:Mine", "  - {name: both, use: ['blamed_first:Mine', 'innocent:Mine']}")
    assert "system 'both': Mine.on_finish: blamed_first.py:6: returned Abort" in failing(base=both)


@pytest.mark.usefixtures("in_process")
def test_other_commands_tell_it_too(folder: Path, call: Command) -> None:
    base = write(folder, "elsewhere", "RolloutControl", "on_finish(self, view)", "return {}['gone']")
    (folder / "base.yaml").write_text(base)
    printed = call("sweep", "base.yaml", "--grid", "seeds=[1]", "--out", "out", "--workers", "1")
    assert printed.code == 1
    assert "Mine.on_finish: elsewhere.py:7: KeyError: 'gone' (line 7: return {}['gone'])" in printed.err
    assert "Traceback" not in printed.err
    assert not list((folder / "out").rglob("steps*"))


class Breaks(RolloutControl):
    def on_finish(self, view: Any) -> Any:
        return {}["gone"]


def test_the_original_exception_is_reachable() -> None:
    for run in (lambda: rlsim.run({**TINY, "systems": [f"{__name__}:Breaks"]}), lambda: check_policy(Breaks)):
        with pytest.raises(
            (PolicyError, ContractError), match=r"Breaks.on_finish: test_hooks.py:\d+: KeyError"
        ) as told:
            run()
        assert isinstance(told.value.__cause__, KeyError)


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k in (*KINDS, ChunkStreaming) for name in hooks(k)])
def test_every_hook_of_every_kind_is_guarded(kind: type, name: str) -> None:
    def fails(self: Any, *_: Any) -> Any:
        raise LookupError("no")

    member = property(fails) if isinstance(vars(kind).get(name), property) else fails
    mine: Any = type("Mine", (kind,), {name: member, "__module__": __name__})
    assert overridden(mine) == [name]
    arguments = [None] * (hooks(kind)[name].fits.__code__.co_argcount or 1)
    with pytest.raises(PolicyError, match=f"Mine.{name}: test_hooks.py:.*LookupError: no"):
        getattr(mine(), name)(*arguments)


def test_mixins_and_what_is_inherited_are_guarded_once() -> None:
    class Mixin:
        def launch(self, feed: Any) -> Any:
            return 1 / 0

    class Mine(Mixin, Batching):
        pass

    class Ours(Mine):
        pass

    for kind in (Mine, Ours):
        assert kind().launches_its_own
        with pytest.raises(PolicyError, match=rf"{kind.__name__}.launch: .*division by zero \(line \d+: return 1 / 0"):
            kind().launch(PromptFeed(1, 1))
