"""Constants that whole published runs give, through the code that `rlsim validate` compares with them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import fmean

from scipy.optimize import brentq

from calibration.catalogue import DATE, SCRIPT
from calibration.training import Case, fit_stacks, gemm_shares
from evidence.validate import weight_sync as syncs
from evidence.validate.coverage import CALLS, LeftOutCalls, TransferCalls, errors_by_setting, level_spread, spread
from evidence.validate.parts import Options
from evidence.validate.published import figures
from evidence.validate.rollpacker import TASKS
from evidence.validate.rollpacker import stage_shares as shares_of
from evidence.validate.runs import told
from evidence.validate.serving import read_runs
from evidence.validate.steps import iterations
from evidence.validate.transfer import kind_rows, shipped_fits, today_rows, unseen_rows
from evidence.validate.weight_sync import predicted_errors, read_syncs
from rlsim.calibrate.write import write_record
from rlsim.cost.assumed import TransferErrors


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


# Settings left out ----------------------------------------------------------------------------------------------------

# How far calibrations are off on settings that no fit has seen: `rlsim.cost.assumed.MEASURED`.

SOURCE = "rl_timings/verl_steps.csv, rl_timings/rl_steps_async.csv (logs of veRL and NeMo-RL)"


def transfer_errors(calls: TransferCalls) -> TransferErrors:
    """From the measured rows, and the errors of calls."""
    evidence = Options().evidence
    rows = unseen_rows(kind_rows(read_runs(evidence), shipped_fits(), "left-out"), today_rows(evidence, print))
    rollout = spread(errors_by_setting(rows, "tpot_s"))
    syncs = level_spread(predicted_errors(read_syncs(evidence)))
    return TransferErrors(rollout.family, rollout.setting, rollout.tilt, level_spread(calls.log_errors()), syncs)


def left_out_calls(cases: tuple[Case, ...]) -> TransferCalls:
    """Errors of every run under the fit that has not seen its group."""
    unseen = [case for case in cases if case.title.startswith(("without ", "driver, without ", "never fitted"))]
    groups = [
        LeftOutCalls(
            runs=tuple(stack.label.partition(":")[0] for stack, *_ in case.rows),
            errors=tuple(timing.error for _, *both in case.rows for timing in both),
        )
        for case in unseen
    ]
    return TransferCalls(date=DATE, script=f"{SCRIPT} transfer", source=SOURCE, left_out=tuple(groups))


def transfer(options: argparse.Namespace) -> None:
    """How far calibrations are off on settings that no fit has seen: `rlsim.cost.assumed.MEASURED`.

    `rollout` and `tilt`: time per output token of every measured serving run, with the fit that has not seen its TP;
    `calls`: log-probs and updates of measured runs, each group left out of the fit of the training stack, and veRL's
    row 4, which nothing is fitted to (written to `evidence/validate/transfer_calls.yaml`); `sync`: weight syncs that no
    constant is fitted to. Each is the root of the mean square over settings.
    """
    calls = left_out_calls(fit_stacks(options.data, gemm_shares(options.data)).cases)
    comment = f"Made by {calls.script}; change that, not this. Errors: rlsim / measured - 1."
    write_record(calls.model_dump(), CALLS, comment)
    for name, value in vars(transfer_errors(calls)).items():
        print(f"{name}={value:.3f}")
