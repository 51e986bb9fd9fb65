"""What scoring each response of a trace takes, and what it brings."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlsim.errors import ConfigError
from rlsim.experiment.schema import RewardSpec
from rlsim.sim.request import Request
from rlsim.sim.reward import RewardJob
from rlsim.trace import Trace


class TraceScoring:
    """The `RewardFunction` of an experiment, by the rows of its trace; those in `cut` do not end.

    A response is worth its `reward`, else 1 or 0 as it is `correct`, else 1; a cut one is wrong and worth nothing.
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
        if self.judged.any() and spec.judge is None:
            raise ConfigError(
                f"trace {trace.meta.name} has responses for an LLM judge (judge_tokens): say which under "
                "workflow.reward.judge, such as {model: qwen2.5-7b}; or set workflow.reward.from_trace: false"
            )
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
