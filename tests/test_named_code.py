"""Code that experiments and packages name: told apart before it is called, and its mistakes told as messages."""

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, ClassVar, Optional

import pytest
from conftest import Command, Failing, cases, edited
from pydantic import Field

from rlsim import Composition, RolloutControl, Schema
from rlsim.errors import ConfigError, PolicyError
from rlsim.experiment.systems import parse_systems
from rlsim.experiment.testing import ContractError, check_policy
from rlsim.policies.parts import Part, flattened
from rlsim.policies.verl import VeRL
from rlsim.sim.actions import Stop
from rlsim.sim.control import ControlContext


def write_policy(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return edited(("  - pat", f"  - {name}:Mine"))


CLASS = "from rlsim import RolloutControl\n\n\nclass Mine(RolloutControl):\n"


@cases("experiments", "a policy file that fails")
def test_a_policy_file_that_fails(failing: Failing, name: str, text: str, message: str) -> None:
    assert message in failing(base=write_policy(failing.folder, name, text.replace("CLASS", CLASS)))


@cases("experiments", "targets that make no workflow")
def test_targets_that_make_no_workflow(failing: Failing, target: str, message: str) -> None:
    (failing.folder / "flows.py").write_text(
        "import sys\nfrom os import getcwd\n\nfrom rlsim.workflow import Workflow\n\n\n"
        "def needs(model, size, *more, other=1):\n    raise AssertionError\n\n\n"
        "def leaves():\n    # on the next line\n    sys.exit(7)\n\n\n"
        "def fails():\n    raise LookupError('no')\n\n\n"
        "def text():\n    return 'text'\n",
        encoding="utf-8",
    )
    sys.modules.pop("flows", None)
    assert message in failing("--set", f"workflow.algorithm={target}")


def test_nothing_of_the_standard_library_is_imported(failing: Failing) -> None:
    sys.modules.pop("antigravity", None)
    assert "standard library" in failing(base=edited(("  - pat", "  - antigravity:X")))
    assert "antigravity" not in sys.modules


def test_a_broken_package_hides_no_other_policy(monkeypatch: pytest.MonkeyPatch, call: Command) -> None:
    points = [
        EntryPoint("broken", "nowhere_at_all:X", "rlsim.policies"),
        EntryPoint("odd", "no-target", "rlsim.policies"),
        EntryPoint("clock", "time:tzset", "rlsim.policies"),
    ]
    monkeypatch.setattr("rlsim.policies.registry.entry_points", lambda **_: points)
    monkeypatch.setenv("COLUMNS", "200")
    listed = call("list", "policies")
    assert listed.code == 0
    printed = " ".join(listed.out.split())
    assert "error: policy 'broken' (nowhere_at_all:X) cannot be loaded: No module named 'nowhere_at_all'" in printed
    assert "error: policy 'clock' (time:tzset): time is a module of Python's standard library" in printed
    assert "rollpacker" in printed
    with pytest.raises(ConfigError, match=r"policy 'broken' \(nowhere_at_all:X\) cannot be loaded"):
        parse_systems(["broken"])
    assert parse_systems(["verl"])


def test_looking_at_results_imports_no_policy(folder: Path, call: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.py").write_text(
        CLASS + "    pass\n\n\ndef flow():\n    from rlsim.workflow import grpo\n\n    return grpo()\n",
        encoding="utf-8",
    )
    base = edited(("  - pat", "  - mine:Mine"), ("prompts: 2", "algorithm: 'mine:flow', prompts: 2"))
    (folder / "base.yaml").write_text(base, encoding="utf-8")
    assert call("run", "base.yaml", "--out", "a").code == 0
    (folder / "mine.py").write_text("open('imported', 'w').close()\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "mine")
    for words in (["report", "a"], ["compare", "a", "a"], ["timeline", "a", "--system", "mine"]):
        assert call(*words).code == 0
    assert "mine" not in sys.modules
    assert not (folder / "imported").exists()


# ---- parts of compositions, and parameters that are lists ---------------------------------------------------------


class _Made(Composition):
    made: ClassVar[Any] = None

    def parts(self) -> Sequence[Part]:
        return self.made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([{"plan": {}}, 42], "returned {'plan': {}}, which is no part of a system: none of RolloutControl, Batching"),
        ([VeRL], r"returned the class VeRL, expected parts: VeRL\(…\)"),
        ("pat", "returned 'pat', expected a list of parts"),
        (None, "returned None, expected a list of parts"),
        ([_Made()], "it is made of itself"),
    ],
)
def test_a_composition_of_anything_else_than_parts(made: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Made, "made", made)
    with pytest.raises(PolicyError, match=message):
        list(flattened([_Made()]))
    with pytest.raises(ContractError, match=message):
        check_policy(_Made)
    monkeypatch.setattr("rlsim.experiment.systems.load_policy", lambda _: _Made)
    with pytest.raises(PolicyError, match=f"system 'made': _Made.parts: test_named_code.py:.*{message}"):
        parse_systems(["made"])


class _Listing(Schema, RolloutControl):
    words: Sequence[str] = ()
    either: Annotated[list[int] | int, Field(description="one or several")] = 0
    maybe: Optional[frozenset[str]] = None  # noqa: UP045
    pair: tuple[int, int] = (0, 0)
    table: Mapping[str, tuple[int, ...]] = {}
    tuple_name: str = ""
    number: int = 0

    def initial_tp(self, context: ControlContext) -> int:
        return context.feasible_tps[0]


@cases("experiments", "whether a list is one value is told from the type")
def test_whether_a_list_is_one_value_is_told_from_the_type(
    parameters: dict[str, Any], systems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsim.experiment.systems.load_policy", lambda _: _Listing)
    assert len(parse_systems([{"listing": parameters}])) == systems


class _Stops(RolloutControl):
    """Not a mistake of rlsim's, and told as such."""

    def initial_tp(self, context: ControlContext) -> int:
        return context.feasible_tps[0]

    def on_finish(self, view: Any) -> Stop:
        raise PolicyError("I give up")


def test_a_policy_may_raise_its_own_message() -> None:
    with pytest.raises(ContractError, match="I give up"):
        check_policy(_Stops)
