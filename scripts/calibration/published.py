"""How far calibrations are off on settings that no fit has seen, through the code of `rlsim validate`."""

from __future__ import annotations

import argparse

from calibration.catalogue import DATE, SCRIPT
from calibration.training import Case, fit_stacks, gemm_shares
from evidence.validate.coverage import CALLS, LeftOutCalls, TransferCalls, errors_by_setting, level_spread, spread
from evidence.validate.parts import Options
from evidence.validate.serving import read_runs
from evidence.validate.transfer import kind_rows, shipped_fits, today_rows, unseen_rows
from evidence.validate.weight_sync import predicted_errors, read_syncs
from rlsim.calibrate.write import write_record
from rlsim.cost.assumed import TransferErrors

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
