"""The workflow that an experiment names, and what scoring the responses of its trace takes and brings."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsim.base.refusals import refuse
from rlsim.base.usercode import blamed, load_object
from rlsim.errors import ConfigError, shown, unknown_name
from rlsim.experiment.schema import RewardSpec, WorkflowSpec
from rlsim.sim.request import Request
from rlsim.sim.reward import RewardJob
from rlsim.trace import Trace
from rlsim.workflow import Call, Edge, Workflow
from rlsim.workflow.algorithms import ALGORITHMS


def workflow_of(spec: WorkflowSpec, roles: Collection[str]) -> Workflow:
    """The calls of a step; `roles` are the models that the experiment has.

    Raises `ConfigError` or `CatalogueError` for an unknown algorithm or model, or a graph that cannot run.
    """
    workflow = _make(spec, roles)
    for call in workflow.calls:
        if call.kind != "reward" and call.model not in roles:
            raise unknown_name(f"model of the call {call.name} (see `models`)", call.model, roles)
    if unused := set(roles) - {"actor", "reference", "critic", *(call.model for call in workflow.calls)}:
        known = sorted({call.model for call in workflow.calls if call.kind != "reward"} - {"actor"})
        raise unknown_name(f"model role for {workflow.name}", min(unused), known)
    return workflow


def _make(spec: WorkflowSpec, roles: Collection[str]) -> Workflow:
    if spec.algorithm == "custom":
        calls = tuple(Call(**call.model_dump()) for call in spec.calls)
        edges = tuple(Edge(**edge.model_dump()) for edge in spec.edges)
        return Workflow("custom", calls, edges, spec.group_advantage)
    if ":" in spec.algorithm:
        return _loaded(spec.algorithm)
    if spec.algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", spec.algorithm, [*ALGORITHMS, "custom"])
    make = ALGORITHMS[spec.algorithm]
    old_log_probs = spec.algorithm == "grpo" if spec.old_log_probs is None else spec.old_log_probs
    given = {
        "reference": spec.reference,
        "old_log_probs": old_log_probs,
        "reward_model": "reward" in roles,
        "reward_first": spec.reward.order != "beside_log_probs",
    }
    return make(**{key: value for key, value in given.items() if key in inspect.signature(make).parameters})


def _loaded(name: str) -> Workflow:
    """The workflow that a function makes; it is not called if it cannot be one that does."""
    what = f"workflow.algorithm: {name}"
    function = load_object(name, what)
    home = getattr(function if inspect.isfunction(function) else type(function), "__module__", None)
    if not callable(function) or isinstance(function, type) or home != name.partition(":")[0]:
        raise ConfigError(f"{what} is no function that is defined in that module")
    signature = inspect.signature(function)
    needed = [
        one.name
        for one in signature.parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    returns = signature.return_annotation
    other = returns not in (signature.empty, Workflow) and "Workflow" not in str(returns)
    refuse("workflow function", what=what, needed=", ".join(needed), other=other, returns=returns)
    with blamed(what):
        made = function()
    if not isinstance(made, Workflow):
        raise ConfigError(f"{what} made {shown(made)}, expected a rlsim.workflow.Workflow")
    return made


# ---- rewards --------------------------------------------------------------------------------------------------------


class TraceScoring:
    """The `RewardFunction` of an experiment, by the rows of its trace; those in `cut` do not end.

    A response is worth its `reward`, else 1 or 0 as it is `correct`, else 1; a cut one is wrong and worth at most 0.
    Raises `ConfigError` if the trace has responses to judge and the experiment no judge.
    """

    def __init__(self, trace: Trace, spec: RewardSpec, cut: npt.NDArray[np.bool_]) -> None:
        self.workers = spec.workers
        self.notes: list[str] = []
        self._prompt = trace.prompt_codes()[0].tolist()
        self._spec = spec
        frame = trace.frame
        unknown = np.full(len(frame), np.nan)
        correct, reward = _floats(frame.get("correct"), unknown), _floats(frame.get("reward"), unknown)
        worth = np.where(np.isnan(reward), correct, reward)
        self.says_rewards = not bool(np.isnan(worth).any())
        worth = np.where(np.isnan(worth), 1.0, worth)
        self._worth = np.where(cut, np.minimum(worth, 0.0), worth).tolist()
        self._correct = ((np.where(np.isnan(correct), worth, correct) > 0) & ~cut).tolist()
        timed = frame if spec.from_trace else frame.iloc[:, :0]
        check_s, judge_tokens = (_floats(timed.get(name), unknown) for name in ("reward_time_s", "judge_tokens"))
        self.judged = ~np.isnan(judge_tokens)
        self._judge_tokens: list[int] = np.where(self.judged, judge_tokens, -1).astype(int).tolist()  # -1: not judged
        self._check_s: list[float] = np.where(np.isnan(check_s), spec.time_per_response, check_s).tolist()
        tests = timed.get("test_run_s")
        self._tests: list[Any] = [None] * len(frame) if tests is None else tests.tolist()
        refuse("scoring", judged=self.judged, spec=spec, trace=trace)
        tested = [cases is not None and not isinstance(cases, float) for cases in self._tests]
        if (
            spec.time_per_response != RewardSpec().time_per_response
            and (self.judged | ~np.isnan(check_s) | tested).all()
        ):
            self.notes.append("workflow.reward.time_per_response has no effect: the trace says what each check takes")
        late = float((check_s > spec.timeout).mean())
        if late:
            self.notes.append(
                f"{late:.1%} of the trace's responses take longer to check than workflow.reward.timeout, "
                f"{spec.timeout:g} s: they are ended there, without reward"
            )

    def job(self, request: Request) -> RewardJob:
        row, spec = request.row, self._spec
        code, worth, correct = self._prompt[row], self._worth[row], self._correct[row]
        judge_tokens = self._judge_tokens[row]
        if judge_tokens >= 0:
            assert spec.judge is not None
            prompt = spec.judge.prompt_tokens + request.prompt_tokens + request.generated
            return RewardJob("judge", code, (), 0.0, worth, correct, prompt, judge_tokens)
        tests = self._tests[row]
        if tests is not None and not isinstance(tests, float):
            return RewardJob("sandbox", code, tuple(tests), spec.sandbox_timeout, worth, correct)
        return RewardJob("rule", code, (self._check_s[row],), spec.timeout, worth, correct)


def _floats(column: Any, unknown: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return unknown if column is None else column.astype("Float64").to_numpy(np.float64, na_value=np.nan)
