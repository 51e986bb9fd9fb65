"""Fits what a calibration leaves free to a user's own run: training efficiency and the host time of rollout.

Every second usable step is fitted, the others are only predicted, and their errors are the result.
docs/calibrating-from-a-run.md says what is taken from the log and what is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlsim.base.reading import read_yaml, shipped
from rlsim.base.refusals import refuse, said
from rlsim.base.schema import Schema
from rlsim.calibrate.fit.common import Array, percent
from rlsim.calibrate.measurements import error_sizes, join, point_rows, residual_of
from rlsim.calibrate.run_fit import (
    HostTimes,
    RolloutTimes,
    Run,
    TrainingShares,
    check_mfu,
    doubts,
    fit_host,
    fit_training,
    host_fit,
    rollout_times,
)
from rlsim.calibrate.write import FromLog, extended
from rlsim.cost.calibration import Calibration, carried_to, load_calibration
from rlsim.errors import CalibrationError
from rlsim.experiment.build import beside, find_trace
from rlsim.experiment.load import load_experiment
from rlsim.experiment.schema import Experiment
from rlsim.experiment.systems import parse_systems
from rlsim.frameworks.settings import ANYTHING
from rlsim.frameworks.verl.lengths import Batch, deals, from_trace, logged_lengths, reconstruct
from rlsim.frameworks.verl.log import VerlLog, read_log
from rlsim.frameworks.verl.run import TrainingArguments, settings_of
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.trace import read_trace
from rlsim.trace.metrics import METRICS

SCRIPT = "rlsim calibrate from-run"
FEWEST_STEPS = 6  # usable ones: half of them are fitted
MOST_STEPS = 80  # more are thinned out evenly: they cost time and add little
WARMUP = 2  # first steps of a log: compilation, graph capture, cold caches
BAD_FIT = 0.2  # 90th percentile of the errors of a training call from which on the cause is worth a word
_NEEDED = ["gen_s", "update_actor_s", "response_mean", "prompt_mean"]


@dataclass(frozen=True, kw_only=True)
class FromRun(FromLog):
    """Of a run: which steps were fitted and which `held_out`; `points` has one row per quantity and step
    (`rlsim.calibrate.measurements.COLUMNS`)."""

    used: tuple[int, ...]
    held_out: tuple[int, ...]
    points: pd.DataFrame


def from_run(
    log: str | Path,
    experiment: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    cluster: str | Mapping[str, Any] | None = None,
    calibration: str | Path | None = None,
    tp: int | None = None,
    prompts: int | None = None,
    responses: int | None = None,
    cap: int | None = None,
    backend: str | None = None,
    train: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    memory_utilization: float | None = None,
    trace: str | Path | None = None,
    prompt_tokens: int | None = None,
    name: str | None = None,
    warmup: int = WARMUP,
) -> FromRun:
    """Fit training efficiency and host time to the metrics in `log` and predict the steps that were not used.

    `cluster` is a name of the catalogue, a cluster spelled out, or the path of such a YAML file; `calibration` is where
    everything else comes from. `tp` is the rollout's. `prompts` × `responses` sequences a step of up to `cap` response
    tokens; `train` are fields of `TrainingArguments`, `engine` of `EngineConfig`. What is None is taken from the
    experiment of the run (as `rlsim init` writes it), else from the configuration that veRL prints at the start of its
    console log. `trace` gives the shape of the lengths, else `rlsim.frameworks.verl.lengths` reconstructs them;
    `prompt_tokens` is the mean length of prompts where the log has none. The first `warmup` steps are left out.

    Raises `CalibrationError` if the log lacks something, contradicts the arguments or itself, has fewer than 6 usable
    steps, or implies an efficiency that no GPU has; other `RlsimError`s for names that do not exist.
    """
    given: dict[str, Any] = {
        "model": model, "cluster": cluster, "calibration": calibration, "tp": tp, "prompts": prompts,
        "responses": responses, "cap": cap, "backend": backend, "memory_utilization": memory_utilization,
        "prompt_tokens": prompt_tokens,
    }  # fmt: skip
    asked = arguments_of(experiment) if experiment is not None else {}
    asked |= {key: value for key, value in given.items() if value is not None}
    missing = [f"--{key}" for key in ("model", "cluster", "calibration") if key not in asked]
    refuse("arguments of a run", CalibrationError, log=log, missing=missing)
    read, where = read_log(log), asked.pop("cluster")
    in_file = isinstance(where, str) and where.endswith((".yaml", ".yml"))
    machines = load_cluster(read_yaml(Path(where)), where) if in_file else load_cluster(where)
    base, shape = carried_to(load_calibration(asked.pop("calibration")), machines), load_model(asked.pop("model"))
    refuse("calibration of a cluster", CalibrationError, calibration=base, cluster=machines)
    read, about_prompts = _with_prompts(read, asked.pop("prompt_tokens", None))
    for metric in _NEEDED:
        read.need(metric)
    settings = settings_of(
        read,
        machines,
        rollout_tp=asked.pop("tp", None),
        train={**asked.pop("train", {}), **(train or {})},
        engine={**asked.pop("engine", {}), **(engine or {})},
        **asked,
    )
    drafting = ("spec_method", "spec_model", "draft_algorithm", "mtp_rollout")
    speculates = settings.engine.speculation or any(read.config.told(ANYTHING, name) for name in drafting)
    refuse("settings of a run", CalibrationError, log=log, speculates=speculates)
    if base.known(shape, settings.rollout_tp).fit is None:  # tables of others hold with the host time they are on
        base = base.model_copy(update={"iterations": ()})
    steps, excluded = _usable(read, warmup)
    logged, size = logged_lengths(read, steps), (settings.prompts, settings.responses, settings.cap)
    if trace is not None:
        dealt = [[batch] for batch in from_trace(read_trace(trace), logged, *size)]
        about_lengths = (
            f"lengths: drawn from {Path(trace).name}, bent to each step's mean and share at the cap or longest"
        )
    else:
        ways = range(deals(settings.prompts * settings.responses))
        dealt = [[reconstruct(one, *size, deal) for deal in ways] for one in logged]
        about_lengths = (
            "lengths: one lognormal a step with the logged mean, and the logged share at the cap or else longest "
            "response; the log keeps no lengths, a trace of the run would"
        )
    batches, used = [ways[0] for ways in dealt], [place % 2 == 0 for place in range(len(steps))]
    run = Run(read, steps, batches, used, settings, shape, machines, base)
    return _fitted(run, dealt, excluded, [*about_prompts, about_lengths], name)


def _fitted(
    run: Run,
    dealt: list[list[Batch]],
    excluded: Mapping[str, int],
    about_lengths: Sequence[str],
    name: str | None,
) -> FromRun:
    notes = [*run.log.notes, *run.settings.notes, *about_lengths, *_odd(run)]
    mfu, about_mfu = check_mfu(run)
    training = fit_training(run)
    times = rollout_times(run.model, run.cluster, run.base, run.settings, dealt)
    host = fit_host(run, times)
    points, errors, more = _report(run, training, times, host)
    notes += [*about_mfu, f"training efficiency: {training.how}", f"host time: {host.how}", *doubts(run.base, host)]
    notes += [*times.notes, *more]
    used = np.asarray(run.used)
    fitted, held_out = (tuple(int(step) for step in run.steps.index[rows]) for rows in (used, ~used))
    about = tuple(dict.fromkeys(notes))
    result = FromRun(run.base, errors, excluded, about, used=fitted, held_out=held_out, points=points)
    return replace(result, calibration=_calibration(result, run, training, host, mfu, name))


def _with_prompts(log: VerlLog, mean: float | None) -> tuple[VerlLog, list[str]]:
    """The log with that mean length of prompts (tokens) in steps that have none, and a note if there are any."""
    lacks = log.steps["prompt_mean"].isna()
    if not lacks.any():
        return log, []
    if mean is None:
        raise CalibrationError(
            f"{log.path}: the log does not say how long prompts are: give --prompt-tokens, or the experiment of the run"
        )
    steps = log.steps.assign(prompt_mean=log.steps["prompt_mean"].fillna(mean))
    return replace(log, steps=steps), [f"prompts are taken to have {mean:.0f} tokens: the log does not say"]


# Which steps ---------------------------------------------------------------------------------------------------------


def _usable(log: VerlLog, warmup: int) -> tuple[pd.DataFrame, dict[str, int]]:
    """The steps to fit and test on, and how many of the others there are, by reason."""
    trained = log.steps[log.steps.gen_s.notna() | log.steps.update_actor_s.notna()]
    often = [name for name in ("old_log_prob_s", "ref_log_prob_s", "step_s") if trained[name].notna().mean() > 0.5]
    reasons = {
        "warm-up": np.arange(len(trained)) < warmup,
        "with validation": trained.testing_s.fillna(0.0) > 0.0,
        "with a checkpoint": trained.save_checkpoint_s.fillna(0.0) > 0.0,
        "with several generated batches": trained.gen_batches.fillna(1.0) > 1.0,
        "lacking a metric": ~np.isfinite(trained[[*_NEEDED, *often]]).all(axis=1),
        "with a time of zero": (trained[["gen_s", "update_actor_s"]] <= 0.0).any(axis=1),
    }
    why = pd.Series("", index=trained.index)
    for reason, mask in reasons.items():
        why[(why == "") & np.asarray(mask, dtype=bool)] = reason
    excluded = {reason: int((why == reason).sum()) for reason in reasons if (why == reason).any()}
    if len(log.steps) > len(trained):
        excluded["without training"] = len(log.steps) - len(trained)
    usable = trained[why == ""]
    one_time = [metric for metric in ("gen_s", "update_actor_s") if usable[metric].nunique() == 1]
    known = {"one_time": one_time, "metrics": METRICS, "excluded": excluded, "fewest": FEWEST_STEPS}
    refuse("usable steps", CalibrationError, log=log, usable=usable, **known)
    if len(usable) > MOST_STEPS:
        chosen = np.unique(np.linspace(0, len(usable) - 1, MOST_STEPS).round().astype(int))
        excluded["thinned out"] = len(usable) - len(chosen)
        usable = usable.iloc[chosen]
    return usable, excluded


def _odd(run: Run) -> list[str]:
    """Signs that the run was not what rlsim's workflow is: calls one after the other, one turn a response."""
    steps = run.steps
    calls = steps[["gen_s", "old_log_prob_s", "update_actor_s"]].sum(axis=1)
    refuse("calls of a run", CalibrationError, path=run.log.path, share=(steps.step_s / calls).median())
    return said(shipped("says.yaml")["calibrate from-run"], steps=steps, turns=steps.turns.median(), logged=run.logged)


# Report --------------------------------------------------------------------------------------------------------------


def _predicted(run: Run, training: TrainingShares | None, gen_s: Array) -> dict[str, Array]:
    """Seconds by step of the calls that are logged; those of training only if there is an efficiency."""
    found = {"gen_s": gen_s}
    if training is not None:
        log_prob = run.log_prob_s(training.forward) + training.call_s
        update = run.update_s(training.flop) + training.call_s
        found |= {"old_log_prob_s": log_prob, "ref_log_prob_s": log_prob, "update_actor_s": update}
    return {name: values for name, values in found.items() if name in run.logged}


def _report(
    run: Run, training: TrainingShares, times: RolloutTimes, host: HostTimes
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    rollouts_s = times.before_s if host.kept else times.total_s(host.step_s, host.sequence_s)
    fitted = _predicted(run, training, rollouts_s)
    base, backend = run.base.training, run.settings.backend
    flop = base.flop_efficiency.get(backend)
    share = flop and TrainingShares(flop, base.forward_efficiency.get(backend, flop), base.call_s.get(backend, 0.0))
    before = _predicted(run, share or None, times.before_s)
    used, notes = np.asarray(run.used), []
    if "step_s" in run.logged:
        calls = sum((run.logged[name] for name in fitted), np.zeros(len(used)))
        rest = float(np.median((run.logged["step_s"] - calls)[used]))
        critic = float(run.steps[["values_s", "update_critic_s"]].sum(axis=1).median())
        others = (
            f"the critic's calls, {critic:.3g} s; " * (critic > 0) + "reward, advantage, weight sync, the trainer's own"
        )
        notes.append(
            f"step_s: the calls above and {rest:.3g} s for everything else ({others} work), the median of what "
            "the used steps leave"
        )
        for found in (fitted, before) if set(before) == set(fitted) else (fitted,):
            found["step_s"] = sum(found.values(), np.full(len(used), rest))
    labels = [f"step {number}" for number in run.steps.index]
    points = join(point_rows(name, labels, run.logged[name], fitted[name], ~used) for name in fitted)
    rows = []
    for name, values in fitted.items():
        off, was = ((one / run.logged[name] - 1.0)[~used] for one in (values, before.get(name, np.nan * values)))
        rows.append({"quantity": name, "steps": len(off), **error_sizes(off), "base_mean": error_sizes(was)["mean"]})
    errors = pd.DataFrame(rows)
    badly = errors[errors.quantity.isin(("old_log_prob_s", "update_actor_s")) & (errors.p90 > BAD_FIT)]
    if len(badly):
        notes.append(
            f"no efficiency suits all training calls ({', '.join(badly.quantity)}: 90th percentile "
            f"{percent(float(badly.p90.max()))}): the cluster's links, the training strategy or offloading may not be "
            "the run's"
        )
    return points, errors, notes


def _calibration(
    result: FromRun, run: Run, shares: TrainingShares, host: HostTimes, mfu: float, name: str | None
) -> Calibration:
    base, settings, log = run.base, run.settings, run.log.path.name
    tested = "; ".join(
        f"{row['quantity']} {percent(row['mean'])} mean, {percent(row['bias'])} bias"
        for row in result.errors.to_dict("records")
    )
    whence = (
        f"{len(result.used)} steps of {log} ({run.model.name} on {run.cluster.name}, "
        f"{settings.prompts} × {settings.responses} sequences, steps {result.used[0]} to {result.used[-1]})"
    )
    training = base.training.model_copy(
        update={
            "flop_efficiency": {**base.training.flop_efficiency, settings.backend: shares.flop},
            "forward_efficiency": {**base.training.forward_efficiency, settings.backend: shares.forward},
            "call_s": {**base.training.call_s, settings.backend: shares.call_s},
            "source": f"{settings.backend}: {whence}, MFU {mfu:.2f}; others, of {base.name}: {base.training.source}",
        }
    )
    source = f"{host.how}; rollouts at TP{settings.rollout_tp} of {whence}; before, of {base.name}: {base.host.source}"
    notes = (
        f"training ({settings.backend}) and host time fitted to {whence}",
        f"errors on {len(result.held_out)} steps of the same run that were not fitted: {tested}",
        *result.notes,
    )
    unseen = run.steps[~np.asarray(run.used)]
    ranges = {"response_mean": unseen.response_mean.to_numpy(float)}
    residuals = {
        f"run_{str(quantity).removesuffix('_s')}": residual_of(
            part, ranges, "steps of the same run that were not fitted"
        )
        for quantity, part in result.points.groupby("operator", sort=False)
    }
    return extended(
        base,
        run.log.path,
        SCRIPT,
        "own veRL run",
        notes,
        name=name,
        training=training,
        host=base.host if host.kept else host_fit(base, host.step_s, host.sequence_s, source),
        residuals={**base.residuals, **residuals},
    )


# The experiment of a run ----------------------------------------------------------------------------------------------


def arguments_of(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `from_run` that an experiment gives; of training and the engine only what it says.

    The rollout's TP is the baseline's, if that is a static one. Raises `ConfigError` for a file that is no experiment.
    """
    experiment, shown, folder = load_experiment(source)
    work, training = experiment.workflow, _said(experiment.training)
    cluster, specs = experiment.cluster, parse_systems(experiment.systems, shown)
    baseline = next((one for one in specs if one.name == experiment.baseline), specs[0])
    degrees = [part.parameters.get("tp") for part in baseline.parts]
    found: dict[str, Any] = {
        "model": beside(experiment.model, folder),
        "cluster": beside(cluster, folder) if isinstance(cluster, str) else cluster,
        "calibration": beside(experiment.calibration_names[0], folder),
        "tp": next((degree for degree in degrees if isinstance(degree, int)), None),
        "prompts": work.prompts,
        "responses": work.responses,
        "cap": experiment.trace.cap,
        "backend": experiment.training.backend,
        "memory_utilization": experiment.memory_utilization,
        "prompt_tokens": _prompt_tokens(experiment, folder),
        "train": {key: value for key, value in training.items() if key in TrainingArguments.model_fields},
        "engine": _said(experiment.engine),
    }
    return {key: value for key, value in found.items() if value is not None}


def _said(block: Schema) -> dict[str, Any]:
    return {key: value for key, value in block.model_dump().items() if key in block.model_fields_set}


def _prompt_tokens(experiment: Experiment, folder: Path) -> int:
    spec = experiment.trace
    if spec.path is None:
        return spec.default_prompt_tokens
    paths = (spec.path,) if isinstance(spec.path, str) else spec.path
    frame = read_trace(find_trace(paths[0], folder)).frame
    return round(frame["prompt_tokens"].mean()) if "prompt_tokens" in frame else spec.default_prompt_tokens
