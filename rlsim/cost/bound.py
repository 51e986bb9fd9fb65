"""How fast a generation stage could be at best: no schedule on these GPUs, however clever, is faster."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlsim.cost.curve import DecodeCurve
from rlsim.cost.step import StepCost

_RATIO = 1.03  # of neighbouring batch sizes in the search for the cheapest


class GenerationBound:
    """Lower bound of a generation stage on `gpus` GPUs with replicas of the given TPs.

    The larger of two times that no schedule avoids:

    - the *longest response*: alone on a replica, each token at the fastest TP for its context, its prompt's prefill
    not counted;
    - the *total work*: a token in the best company costs at least α GPU-seconds plus β per token of its context. With
      `step(b, T) ≥ step(b, 0) + s_b · T`, α is the minimum over TP and b of `tp · step(b, 0) / b` and β that of `tp ·
      s_b`. Steps are taken to grow with b and T; between sampled batch sizes that makes α smaller, never larger.
    """

    def __init__(self, steps: Mapping[int, StepCost], gpus: int, max_batch: int) -> None:
        self._gpus = gpus
        self._single = [step.decode(1) for step in steps.values()]
        alpha = beta = float("inf")
        for tp, step in steps.items():
            batches = _batches(max_batch)
            for batch, following in zip(batches, [*batches[1:], max_batch + 1], strict=True):
                curve = step.decode(batch)
                empty_s = curve.step_s(0.0)
                alpha = min(alpha, tp * empty_s / (following - 1))
                far = [*(x for x in curve.knots if x > 0), 2.0 * curve.knots[-1] + 1e6]
                beta = min(beta, *(tp * (curve.step_s(x) - empty_s) / x for x in far))
        self._alpha, self._beta = alpha, max(beta, 0.0)

    def time_s(self, prompt_tokens: ArrayLike, response_tokens: ArrayLike) -> float:
        """Seconds for these responses (one prompt and one response length each, in tokens); 0 for none."""
        prompts, lengths = np.asarray(prompt_tokens, dtype=np.float64), np.asarray(response_tokens, dtype=np.float64)
        if not len(lengths):
            return 0.0
        decoded = lengths - 1  # the prefill gives the first token
        contexts = decoded * (prompts + 1) + decoded * (decoded - 1) / 2
        work_s = (self._alpha * decoded.sum() + self._beta * contexts.sum()) / self._gpus
        longest = int(np.argmax(lengths))
        along = prompts[longest] + 1 + np.arange(int(decoded[longest]))
        fastest = np.min([_at(curve, along) for curve in self._single], axis=0)
        return float(max(work_s, fastest.sum()))


def _batches(largest: int) -> list[int]:
    found = [1]
    while found[-1] < largest:
        found.append(min(max(found[-1] + 1, int(found[-1] * _RATIO)), largest))
    return found


def _at(curve: DecodeCurve, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
    """A decode curve at many contexts."""
    x = sorted({*curve.knots, 0.0, float(contexts.max(initial=0.0)) + 1.0})
    return np.interp(contexts, x, [curve.step_s(value) for value in x])
