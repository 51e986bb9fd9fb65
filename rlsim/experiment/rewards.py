"""What scoring each response of a trace takes, and what it brings."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsim.errors import ConfigError
from rlsim.experiment.schema import RewardSpec
from rlsim.sim.request import Request
from rlsim.sim.reward import RewardJob
from rlsim.trace import Trace


class TraceScoring:
    """The `Scoring` of an experiment, by the rows of its trace.

    A trace that does not say what a response is worth makes each worth 1. Raises `ConfigError` if it has responses to
    judge and the experiment no judge.
    """

    def __init__(self, trace: Trace, spec: RewardSpec) -> None:
        self.workers = spec.workers
        self._prompt = trace.prompt_codes()[0].tolist()
        self._spec = spec
        frame = trace.frame
        self._reward = _floats(frame.get("reward", frame.get("correct")))
        timed = frame if spec.from_trace else frame.iloc[:, :0]
        self._check_s = _floats(timed.get("reward_time_s"))
        self._judge = _floats(timed.get("judge_tokens"))
        tests = timed.get("test_run_s")
        self._tests: list[Any] | None = None if tests is None else tests.tolist()
        self.judged = self._judge is not None and not bool(np.isnan(self._judge).all())
        if self.judged and spec.judge is None:
            raise ConfigError(
                f"trace {trace.meta.name} has responses for an LLM judge (judge_tokens): say which under "
                "workflow.reward.judge, such as {model: qwen2.5-7b}; or set workflow.reward.from_trace: false"
            )

    @property
    def says_rewards(self) -> bool:
        """Whether the trace says what responses are worth."""
        return self._reward is not None

    def job(self, request: Request) -> RewardJob:
        """What scoring this response takes."""
        row, spec, code = request.row, self._spec, self._prompt[request.row]
        reward = 1.0 if self._reward is None or np.isnan(self._reward[row]) else float(self._reward[row])
        if self._judge is not None and spec.judge is not None and not np.isnan(self._judge[row]):
            prompt = spec.judge.prompt_tokens + request.prompt_tokens + request.generated
            return RewardJob("judge", code, (), 0.0, reward, prompt, int(self._judge[row]))
        tests = None if self._tests is None else self._tests[row]
        if tests is not None and not isinstance(tests, float):
            return RewardJob("sandbox", code, tuple(tests), spec.sandbox_timeout, reward)
        check_s = np.nan if self._check_s is None else self._check_s[row]
        runs = (spec.time_per_response if np.isnan(check_s) else float(check_s),)
        return RewardJob("rule", code, runs, spec.timeout, reward)


def _floats(column: Any) -> Any:
    return None if column is None else column.astype("Float64").to_numpy(np.float64, na_value=np.nan)
