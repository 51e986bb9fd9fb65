"""How fast a generation stage could be at best: no schedule on these GPUs, however clever, is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlsim.cost.curve import DecodeCurve, InWindows
from rlsim.cost.step import StepCost

_RATIO = 1.03  # of neighbouring batch sizes in the search for the cheapest
_STEP_TOKENS = 32  # contexts are looked up this coarsely; step times grow with the context


class GenerationBound:
    """Lower bound of a generation stage on `gpus` GPUs with replicas of the given TPs.

    `others`: TPs and steps of further replicas, on GPUs of another kind or of another engine.

    The larger of two times that no schedule avoids:

    - the *longest response*: each token at the fastest TP for its context, alone or in the company of others (some
      kernels run one long sequence faster beside short ones); its prompt's prefill is not counted;
    - the *total work*: in the best company a token with t tokens of context costs at least
      g(t) = min over TP and b of `tp · step(b, b·t) / b` GPU-seconds. A step's cost depends on its contexts by their
      sum only, so every straight line below g bounds the sum over all tokens; the best line at their mean context is
      the lower convex hull of g there. Steps are taken to grow with b; between sampled batch sizes that makes g
      smaller, never larger. Attention within windows does not depend on that sum, and counts as if there were no
      tokens in them.
    """

    def __init__(
        self,
        steps: Mapping[int, StepCost],
        gpus: int,
        max_batch: int,
        others: Sequence[tuple[int, StepCost]] = (),
    ) -> None:
        self._gpus = gpus
        self._curves: list[DecodeCurve] = []
        self._fastest = np.empty(0)
        batches = [1]
        while batches[-1] < max_batch:
            batches.append(min(max(batches[-1] + 1, int(batches[-1] * _RATIO)), max_batch))
        shares = []  # GPUs that a token of a batch pays for: of at most as many sequences as the next size has less one
        for tp, step in (*steps.items(), *others):
            for batch, following in zip(batches, [*batches[1:], max_batch + 1], strict=True):
                self._curves.append(step.best.decode(batch, InWindows(0.0, 0.0) if step.kv.window_tokens else None))
                shares.append(tp / (following - 1))
        # Between the knots of all curves each is a straight line, so the hull of g at the knots is that of g.
        contexts = np.unique([knot / curve.batch for curve in self._curves for knot in (0.0, *curve.knots)])
        contexts = np.append(contexts, 2.0 * contexts[-1] + 1e6)
        least = np.min(
            [share * _at(curve, contexts * curve.batch) for share, curve in zip(shares, self._curves, strict=True)],
            axis=0,
        )
        self._hull = _lower_hull(contexts, least)

    def time_s(self, prompt_tokens: ArrayLike, response_tokens: ArrayLike) -> float:
        """Seconds for these responses (one prompt and one response length each, in tokens); 0 for none."""
        prompts, lengths = np.asarray(prompt_tokens, dtype=np.float64), np.asarray(response_tokens, dtype=np.float64)
        if not len(lengths):
            return 0.0
        longest = int(np.argmax(lengths))
        along = prompts[longest] + 1 + np.arange(int(lengths[longest]) - 1)
        return max(self.work_s(prompts, lengths), float(self._fastest_s(along).sum()))

    def work_s(self, prompt_tokens: ArrayLike, response_tokens: ArrayLike) -> float:
        """The same for the total work alone: all that bounds a stage that works on other responses beside these."""
        prompts, lengths = np.asarray(prompt_tokens, dtype=np.float64), np.asarray(response_tokens, dtype=np.float64)
        decoded = lengths - 1  # the prefill gives the first token
        contexts = decoded * (prompts + 1) + decoded * (decoded - 1) / 2
        tokens = float(decoded.sum())
        mean = float(contexts.sum()) / tokens if tokens else 0.0
        return tokens * float(np.interp(mean, *self._hull)) / self._gpus

    def _fastest_s(self, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
        """The fastest step of any TP and batch at each context, rounded down to a multiple of `_STEP_TOKENS`."""
        index = (contexts // _STEP_TOKENS).astype(np.int64)
        needed = int(index.max(initial=-1)) + 1
        if needed > len(self._fastest):
            grid = np.arange(2 * needed, dtype=np.float64) * _STEP_TOKENS
            self._fastest = np.min([_at(curve, grid) for curve in self._curves], axis=0)
        return self._fastest[index]


def _lower_hull(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    kept: list[tuple[float, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(kept) > 1 and (kept[-1][1] - kept[-2][1]) * (point[0] - kept[-2][0]) >= (point[1] - kept[-2][1]) * (
            kept[-1][0] - kept[-2][0]
        ):  # the last lies on or above the line from the one before to this
            kept.pop()
        kept.append(point)
    return [a for a, _ in kept], [b for _, b in kept]


def _at(curve: DecodeCurve, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
    x = sorted({*curve.knots, 0.0, float(contexts.max(initial=0.0)) + 1.0})
    return np.interp(contexts, x, [curve.step_s(value) for value in x])
