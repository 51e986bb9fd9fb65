"""How fast a generation stage could be at best: no schedule on these GPUs, however clever, is faster."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlsim.cost.curve import DecodeCurve
from rlsim.cost.step import StepCost

_RATIO = 1.03  # of neighbouring batch sizes in the search for the cheapest
_STEP_TOKENS = 32  # contexts are looked up this coarsely; step times grow with the context


class GenerationBound:
    """Lower bound of a generation stage on `gpus` GPUs with replicas of the given TPs.

    The larger of two times that no schedule avoids:

    - the *longest response*: each token at the fastest TP for its context, alone or in the company of others (some
      kernels run one long sequence faster beside short ones); its prompt's prefill is not counted;
    - the *total work*: a token in the best company costs at least α GPU-seconds plus β per token of its context. With
      `step(b, T) ≥ step(b, 0) + s_b · T`, α is the minimum over TP and b of `tp · step(b, 0) / b` and β that of
      `tp · s_b`. Empty steps are taken to grow with b; between sampled batch sizes that makes α smaller, never larger.
    """

    def __init__(self, steps: Mapping[int, StepCost], gpus: int, max_batch: int) -> None:
        self._gpus = gpus
        self._curves: list[DecodeCurve] = []
        self._fastest = np.empty(0)
        alpha = beta = float("inf")
        batches = _batches(max_batch)
        for tp, step in steps.items():
            for batch, following in zip(batches, [*batches[1:], max_batch + 1], strict=True):
                curve = step.decode(batch)
                self._curves.append(curve)
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
        return float(max(work_s, self._fastest_s(along).sum()))

    def _fastest_s(self, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
        """The fastest step of any TP and batch at each context, rounded down to a multiple of `_STEP_TOKENS`."""
        index = (contexts // _STEP_TOKENS).astype(np.int64)
        needed = int(index.max(initial=-1)) + 1
        if needed > len(self._fastest):
            grid = np.arange(2 * needed, dtype=np.float64) * _STEP_TOKENS
            self._fastest = np.min([_at(curve, grid) for curve in self._curves], axis=0)
        return self._fastest[index]


def _batches(largest: int) -> list[int]:
    found = [1]
    while found[-1] < largest:
        found.append(min(max(found[-1] + 1, int(found[-1] * _RATIO)), largest))
    return found


def _at(curve: DecodeCurve, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
    """A decode curve at many contexts."""
    x = sorted({*curve.knots, 0.0, float(contexts.max(initial=0.0)) + 1.0})
    return np.interp(contexts, x, [curve.step_s(value) for value in x])
