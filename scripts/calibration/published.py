"""Constants that whole published runs give, through the code that `rlsim validate` compares with them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import numpy as np
from scipy.optimize import brentq

from evidence.validate import weight_sync as syncs
from evidence.validate.parts import Options
from evidence.validate.published import evaluated, figures
from evidence.validate.rollpacker import TASKS
from evidence.validate.rollpacker import stage_shares as shares_of
from evidence.validate.rows import Row
from evidence.validate.runs import told
from evidence.validate.steps import iterations
from rlsim.calibrate.write import write_yaml
from rlsim.cost.calibration import EagerFit, load_calibration

#: Share of a layer's launches under tensor parallelism that its two collectives are.
SHARES = (0.0, 0.3, 0.6)


def eager(_: object) -> None:
    """What a decode step without CUDA graphs takes the host to launch, and training's share of the peak, to PPO steps.

    Two numbers of ReaLHF's runs: seconds to launch a layer, and each of its two collectives under tensor parallelism.
    The steps of the heuristic, TP8, give their sum. Those of searched plans, which prefer lower degrees, tell the
    two apart: they are predicted with the plan that rlsim finds for each of a few shares of the collectives, and
    the share in between that meets the measured steps is taken. Then the share of the peak at which the heuristic's
    steps come out right on average. Each model is fitted alone; `rlsim.cost.calibration.EAGER` and
    `evidence/realhf_steps.yaml` hold the fit to the smaller one. Ten minutes, most of it searches for plans.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for size in (7, 34):
            _eager_of(size, Path(scratch))


def _eager_of(size: int, folder: Path) -> None:
    """Fit one model's runs, and print."""

    def excess(whole_s: float) -> float:
        rows = _steps(size, "heuristic", whole_s, 0.0, folder)
        return _slope(rows, measured=False) - _slope(rows, measured=True)

    def bias(efficiency: float) -> float:
        rows = _steps(size, "heuristic", whole_s, 0.0, folder, {"training.efficiency": efficiency})
        return float(np.mean([np.log1p(row.error) for row in rows]))

    whole_s = float(brentq(excess, 0.5e-3, 3e-3, xtol=5e-6))
    print(f"{size}B, heuristic: {whole_s * 1e3:.3f} ms a layer with its collectives at TP8", flush=True)
    measured_s, tokens_s = 0.0, []
    for share in SHARES:
        rows = _steps(size, "searched", whole_s * (1 - share), whole_s * share / 2, folder)
        measured_s = _slope(rows, measured=True)
        tokens_s.append(_slope(rows, measured=False))
        print(f"  collectives {share:.0%} of that: searched plans {tokens_s[-1] * 1e3:.1f} ms a token", flush=True)
    # The larger the share of collectives, the less a token takes under low degrees.
    share = float(np.interp(measured_s, tokens_s[::-1], SHARES[::-1]))
    print(
        f"  measured {measured_s * 1e3:.1f} ms a token: collectives {share:.0%}, layer_s "
        f"{whole_s * (1 - share) * 1e3:.3f}e-3, collective_s {whole_s * share / 2 * 1e3:.3f}e-3",
        flush=True,
    )
    print(f"  training at {brentq(bias, 0.3, 0.9, xtol=1e-3):.3f} of the peak", flush=True)


def _steps(
    size: int,
    plan: str,
    layer_s: float,
    collective_s: float,
    folder: Path,
    more: Mapping[str, float] = MappingProxyType({}),
) -> list[Row]:
    """A model's steps with a kind of plan under these launches, measured and simulated."""
    tried = EagerFit(layer_s=layer_s, collective_s=collective_s, source="tried")
    calibration = write_yaml(load_calibration("a800-sglang").model_copy(update={"eager": tried}), folder)
    known = figures(Options(), "realhf_steps")
    found = {}
    for name, one in known.runs.items():
        if f"_{size}b_" in name and isinstance(one.experiment, dict):
            systems = [system for system in one.experiment["systems"] if system["name"] == plan]
            found[name] = told(one.result({"calibration": str(calibration), "systems": systems, **more}))
    rows = [row for row in known.rows if f"-{size}b/{plan}/" in row.case]
    return [Row("steps", row.case, row.quantity, float(row.value), evaluated(row.of, found)) for row in rows]


def _slope(rows: Sequence[Row], *, measured: bool) -> float:
    """Seconds a step gains with each generated token, over rows that all train on as many tokens."""
    tokens = [int(row.case.rpartition("x")[2]) for row in rows]
    return float(np.polyfit(tokens, [row.reference if measured else row.simulated for row in rows], 1)[0])


def expert_launch_s() -> float:
    """Seconds of the forward pass of one layer."""
    (smallest,) = (one for one in iterations() if one.kind == "input")
    return float(brentq(lambda launch_s: smallest.simulated_s(launch_s) - smallest.iteration_s, 1e-4, 2e-2))


def expert_launch(_: object) -> None:
    """The host's time to launch a layer with experts, to a published iteration of Megatron Core.

    Of the iterations of `evidence.validate.steps` the one with the smallest micro-batches (1,024 tokens on a
    GPU) is the only one that the GPU's work and its messages leave far too fast. `EXPERT_LAUNCH_S` is what brings it
    to its measured seconds; all others take longer than that for each layer, so they say nothing of it.
    """
    found = expert_launch_s()
    print(f"EXPERT_LAUNCH_S = {found * 1e3:.2f}e-3")
    for one in iterations():
        without, now = (one.simulated_s(launch_s) / one.iteration_s - 1 for launch_s in (0.0, found))
        print(f"{one.case}: {without:+.1%} without launches, {now:+.1%} with them ({one.kind})")


def stage_shares(_: object) -> None:
    """The training efficiency of RollPacker's setup, to the published stage shares of its baseline.

    One number for three tasks: the share of peak at which training's mean share of a veRL step is the published 22%
    (23, 21 and 22%; an input figure, never an output). Half a minute. `experiments/rollpacker_*.yaml` and their
    ablations hold the result.
    """

    known = figures(Options(), "rollpacker")

    def training_share(efficiency: float) -> float:
        runs = [known.runs[f"shares_{task}"].result({"training.efficiency": efficiency}) for task in TASKS]
        return sum(shares_of(told(one)["verl"])["training"] for one in runs) / len(runs)

    published = fmean(float(row.value) for row in known.rows if row.quantity == "training share")
    fitted = float(brentq(lambda x: training_share(x) - published, 0.03, 0.6, xtol=5e-4))
    share = training_share(fitted)
    print(f"training.efficiency: {fitted:.3f}   (training share {share:.3f}, published {published:.3f})")


def weight_sync(_: object) -> None:
    """The constants of weight syncs, to measured ones: `rlsim.cost.weight_sync.FITTED`; errors on settings left out.

    Which rows are fitted, which are predicted and which are left out is written down in `evidence/weight_syncs.yaml`.
    """
    used = syncs.settings().used
    measured = {row: time for row, (_, time) in syncs.read_syncs(Options().evidence).items()}
    found = syncs.fitted(measured, [row for row, setting in used.items() if setting.kind == "input"])
    for name, value in asdict(found).items():
        print(f"{name} = {value:.4g}")
    print("\nid case kind measured error")
    for row, setting in used.items():
        error = syncs.seconds(setting, found) / measured[row] - 1
        print(f"{row:2d} {setting.case:27s} {setting.kind:6s} {measured[row]:6.3f} {error:+.1%}")
    print("\nfitted to all rows of other settings; open: they leave a constant open that the row depends on")
    for row, predicted in syncs.left_out(measured):
        error_text = "open" if predicted is None else f"{predicted / measured[row] - 1:+.1%}"
        print(f"{row:2d} {used[row].case:27s} {error_text}")
