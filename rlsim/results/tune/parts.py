"""Where the time of a configuration goes, and what fits on its GPUs.

Why they are idle: the bubble of every GPU split exactly by cause, tables in, a table out, by the rules of docs/tune.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rlsim.cost.ledger import GB, total
from rlsim.cost.memory import RESERVED_BYTES
from rlsim.cost.rollout import powers_of_two
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.engines import rollout_costs
from rlsim.experiment.parts import never_stops
from rlsim.experiment.placed import PlacedExperiment
from rlsim.results.tune.space import baseline_of
from rlsim.results.tune.trial import Run, simulator_of, tables_of
from rlsim.sim.request import AGENT

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: What a GPU with nothing to do waits for.
CAUSES = ("length_skew", "split_imbalance", "kv_limit", "tools", "tool_queues", "stage_barrier")
#: Spans of a rollout's replicas, by kind; all others are those of calls.
GENERATING = ("decode", "prefill", "mixed", "switch")
_RUN = ["case", "system", "seed"]
COLUMNS = (*_RUN, "step", "cause", "waits_for", "idle_s")


def idle_causes(
    steps: pd.DataFrame,
    spans: pd.DataFrame,
    responses: pd.DataFrame,
    stays: pd.DataFrame,
    calls: pd.DataFrame,
    gpus: int,
) -> pd.DataFrame:
    """Idle seconds of all GPUs by cause, from the tables of a result (docs/results.md) on `gpus` GPUs.

    One row per case, system, seed, step and `cause` (one of `CAUSES`) with `idle_s` above 0; `waits_for` names the call
    whose end a stage barrier waits for ("" for other causes, and where no call runs). The rows of a step add up to
    `bubble_fraction · gpus · step_time_s`.
    """
    found: list[pd.DataFrame] = []
    for run, windows, (own_spans, own_responses, own_stays, own_calls) in _runs(steps, spans, responses, stays, calls):
        stages = _stages(own_spans, own_responses, own_stays, own_calls, gpus)
        for step, start, end in windows:
            found.append(_of_window(start, end, own_spans, own_calls, stages, gpus).assign(step=step, **run))
    frame = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=list(COLUMNS))
    return frame[list(COLUMNS)]


def _runs(
    steps: pd.DataFrame, *tables: pd.DataFrame
) -> Iterator[tuple[dict[str, Any], list[tuple[int, float, float]], list[pd.DataFrame]]]:
    """Of every run: what names it, the start and end of its steps by their number, and its rows of the tables."""
    by_run = [dict(iter(table.groupby(_RUN, sort=False))) for table in tables]
    for run, own in steps.groupby(_RUN, sort=False):
        ordered = own.sort_values("step")
        ends = ordered["step_time_s"].to_numpy(np.float64).cumsum()
        windows = list(zip(ordered["step"], [0.0, *ends[:-1]], ends, strict=True))
        rows = [found.get(run, table.iloc[:0]) for found, table in zip(by_run, tables, strict=True)]
        yield dict(zip(_RUN, run, strict=True)), windows, rows


# ---- a generation stage ---------------------------------------------------------------------------------------------


class _Stage(NamedTuple):
    """One generation stage: its GPUs, their TP over time, and when its responses ended.

    A rollout that never stops (`endless`) is one stage of the whole run. What it lacks is prompts, if training is what
    lets them in.
    """

    start: float
    end: float
    mesh: Flags  # by GPU: whether the stage has it
    layouts: list[tuple[float, int, int]]  # from when on which GPU has which TP, in order of time
    begun: Floats  # sorted: from when on each response is under way
    finished: Floats  # sorted: when each response ended, at the latest with the stage
    undelayed: Floats  # sorted: when each would have ended without its waits for admission
    acting: tuple[Floats, Floats]  # see `_acting`
    endless: bool = False

    def under_way(self, ends: Floats, at: Floats) -> Integers:
        """How many responses are under way at these moments, if they end then."""
        return np.searchsorted(self.begun, at, side="right") - np.searchsorted(ends, at, side="right")

    def away(self, at: Floats) -> Floats:
        """How many trajectories are away at these moments; of them at their tools, and of these in queues."""
        moments, counts = self.acting
        return counts[:, np.searchsorted(moments, at, side="right")]


def _stages(
    spans: pd.DataFrame, responses: pd.DataFrame, stays: pd.DataFrame, calls: pd.DataFrame, gpus: int
) -> list[_Stage]:
    spans = spans[spans["kind"].isin(GENERATING) & ~spans["shared"]]
    generates = calls[calls["kind"] == "generate"]
    own = stays[stays["call"].isin(generates["call"])]
    if never_stops(own, calls):  # each response is under way from its first stay on
        start, end = float(spans["start_at"].min()), float(max(spans["end_at"].max(), calls["end_at"].max()))
        begun = own.groupby("response")["arrived_at"].min()
        there = responses[responses["response"].isin(begun.index)]
        begun_at = there["response"].map(begun).to_numpy(np.float64)
        return [_stage(start, end, spans, there, begun_at, own, int(generates["gpus"].max()), gpus, endless=True)]
    by_step = dict(iter(spans.groupby("step")))
    launched = dict(iter(responses.groupby("step")))
    queued = dict(iter(stays.groupby(["step", "call"])))
    found = []
    for call in generates.to_dict("records"):
        step, start, end = call["step"], float(call["start_at"]), float(call["end_at"])
        if step in by_step and step in launched:
            queue = queued.get((step, call["call"]), stays.iloc[:0])
            there = launched[step][launched[step]["response"].isin(queue["response"])]
            begun_at = np.full(len(there), start)
            found.append(_stage(start, end, by_step[step], there, begun_at, queue, int(call["gpus"]), gpus))
    return found


def _stage(
    start: float, end: float, spans: pd.DataFrame, responses: pd.DataFrame, begun_at: Floats, stays: pd.DataFrame,
    count: int, gpus: int, *, endless: bool = False,
) -> _Stage:  # fmt: skip
    """A stage on `count` GPUs of all; what is resumed and had ended in an earlier step is not waited for."""
    ended = responses["finish_at"].fillna(end).clip(upper=end).to_numpy(np.float64)
    undelayed, here, each = ended - _waits(responses, stays, spans), ended > start, _by_gpu(spans)
    mesh = _mesh(np.unique(each["gpu"].to_numpy(np.int64)), count, gpus)
    begun, finished, without_waits = (np.sort(moments[here]) for moments in (begun_at, ended, undelayed))
    acting = _acting(responses.assign(ended=ended), stays)
    return _Stage(start, end, mesh, _layouts(each), begun, finished, without_waits, acting, endless)


def _by_gpu(spans: pd.DataFrame) -> pd.DataFrame:
    """One row per span and GPU: gpu, start_at, tp; by time."""
    count = spans["gpus"].to_numpy(np.int64)
    each = np.repeat(np.arange(len(spans)), count)
    within = np.arange(len(each)) - np.repeat(count.cumsum() - count, count)
    frame = spans[["gpu", "start_at", "tp"]].iloc[each]
    return frame.assign(gpu=frame["gpu"].to_numpy(np.int64) + within).sort_values("start_at", kind="stable")


def _mesh(seen: Integers, count: int, gpus: int) -> Flags:
    """The GPUs of a stage that has `count`, of which those `seen` have worked: a block of neighbours if it can be."""
    mesh = np.zeros(gpus, np.bool_)
    mesh[seen] = True
    first = max(int(seen.max()) + 1 - count, 0)
    if len(seen) < count and first <= seen.min():
        mesh[first : first + count] = True
    return mesh


def _layouts(each: pd.DataFrame) -> list[tuple[float, int, int]]:
    """When a GPU's TP is first known, and when it changes."""
    changed = each[each.groupby("gpu")["tp"].diff() != 0]
    return list(zip(changed["start_at"].tolist(), changed["gpu"].tolist(), changed["tp"].tolist(), strict=True))


def _waits(responses: pd.DataFrame, stays: pd.DataFrame, spans: pd.DataFrame) -> Floats:
    """How long each response waited in queues whose replica had begun to decode (s).

    A replica decodes once it admits nothing more: who is still in its queue found no KV pages or no place left.
    """
    decoding = spans[spans["kind"] == "decode"]
    began = decoding.groupby("label")["start_at"].min().reindex("replica " + stays["replica"].astype(str))
    admitted = stays["admitted_at"].fillna(stays["left_at"]).to_numpy(np.float64)
    since = np.maximum(stays["arrived_at"].to_numpy(np.float64), began.to_numpy(np.float64))
    waited = np.fmax(admitted - since, 0.0)  # NaN, and so 0, where the replica never decoded
    total = pd.Series(waited).groupby(stays["response"].to_numpy()).sum()
    return total.reindex(responses["response"]).fillna(0.0).to_numpy(np.float64)


def _acting(responses: pd.DataFrame, stays: pd.DataFrame) -> tuple[Floats, Floats]:
    """When trajectories leave for their tools and come back, and how many (`_Stage.away`) are away from then on.

    A trajectory is away between a stay that a tool call ends and its next one, while no sub-agent of its own has a stay
    either. As much of that time as of all its absences is spent in calls and queues; for the rest it waits for others.
    """
    own = stays.assign(response=stays["response"] % AGENT).sort_values(["response", "arrived_at"], kind="stable")
    own = own.merge(responses[["response", "ended", "tool_s", "tool_wait_s"]], on="response")
    of_response = own.groupby("response")
    own["since"] = of_response["left_at"].cummax()
    own["until"] = of_response["arrived_at"].shift(-1).fillna(own["ended"])
    own = own[own["left"].isin(("tool", "finished")) & (own["until"] > own["since"])]
    acting_s = own["tool_s"] + own["tool_wait_s"]
    absent_s = (own["until"] - own["since"]).groupby(own["response"]).transform("sum").clip(lower=acting_s)
    each = np.stack([np.ones(len(own)), acting_s / absent_s, own["tool_wait_s"] / absent_s])
    moments = np.concatenate([own["since"], own["until"]])
    order = np.argsort(moments, kind="stable")
    counts = np.concatenate([np.zeros((3, 1)), np.concatenate([each, -each], axis=1)[:, order].cumsum(axis=1)], axis=1)
    return moments[order], counts


# ---- a window of time -----------------------------------------------------------------------------------------------


def _of_window(
    start: float, end: float, spans: pd.DataFrame, calls: pd.DataFrame, stages: Sequence[_Stage], gpus: int
) -> pd.DataFrame:
    """Idle seconds from `start` to `end`: cause, waits_for, idle_s."""
    own = spans[(spans["end_at"] > start) & (spans["start_at"] < end)]
    running = calls[(calls["end_at"] > start) & (calls["start_at"] < end)]
    within = [stage for stage in stages if stage.end > start and stage.start < end]
    moments = [f[c].to_numpy(np.float64) for f in (own, running) for c in ("start_at", "end_at")]
    moments += [np.concatenate([[s.start, s.end], s.finished, s.undelayed, s.acting[0]]) for s in within]
    times = np.concatenate([[start, end], *moments])
    edges = np.unique(times[(times >= start) & (times <= end)])
    width, middle = np.diff(edges), (edges[:-1] + edges[1:]) / 2
    generating = _busy(own[own["kind"].isin(GENERATING)], edges, gpus)
    idle = ~(generating | _busy(own[~own["kind"].isin(GENERATING)], edges, gpus))
    seconds = {cause: np.zeros(gpus) for cause in CAUSES[:-1]}
    trains = _running(running[~running["kind"].isin(("generate", "reward"))], middle) != ""
    barrier, endless = idle.astype(np.float64), np.zeros(gpus, np.bool_)
    for stage in within:
        piece = (middle > stage.start) & (middle < stage.end)
        left = stage.under_way(stage.finished, middle)
        piece &= left > 0  # nothing left to generate: the stage waits for something else
        held_up = piece & (stage.under_way(stage.undelayed, middle) == 0)
        waiting = idle & stage.mesh[:, None] & piece[None, :]
        barrier[waiting] = 0.0
        seconds["kv_limit"] += (waiting[:, held_up] * width[held_up]).sum(axis=1)
        rest = np.flatnonzero(piece & ~held_up)
        if len(rest):
            away, acts, queue = stage.away(middle[rest])
            here = left[rest] - away
            uneven, without_tools = (
                _uneven_share(stage, waiting[:, rest], generating[:, rest], count, middle[rest])
                for count in (here, left[rest])
            )
            whole = np.where(here > 0, away, acts)  # where nobody generates, those who wait for others wait for tools
            shares = (np.divide(of, whole, out=np.zeros_like(whole), where=whole > 0) for of in (acts, queue))
            acting, in_queues = ((without_tools - uneven) * share for share in shares)
            skewed = 1.0 - uneven - acting
            lost = waiting[:, rest] * width[rest]
            for cause, of in (("split_imbalance", uneven), ("tools", acting - in_queues), ("tool_queues", in_queues)):
                seconds[cause] += (lost * of).sum(axis=1)
            held_back = stage.endless & trains[rest]
            barrier[:, rest] += waiting[:, rest] * skewed * held_back
            seconds["length_skew"] += (lost * skewed * ~held_back).sum(axis=1)
        endless |= stage.mesh & stage.endless
    rows = [(cause, "", found.sum()) for cause, found in seconds.items()]
    # A rollout that never stops waits for the others' calls; its own ones are when these wait for a batch.
    for these, waited in ((~endless, running), (endless, running[running["kind"] != "generate"])):
        names = _running(waited, middle)
        for name in dict.fromkeys(names.tolist()):
            chosen = names == name
            rows.append(("stage_barrier", name, (these * (barrier[:, chosen] * width[chosen]).sum(axis=1)).sum()))
    return pd.DataFrame([row for row in rows if row[-1] > 0.0], columns=[*COLUMNS[4:]])


def _uneven_share(stage: _Stage, idle: Flags, generating: Flags, left: Floats | Integers, at: Floats) -> Floats:
    """By GPU and piece of time: the share of its idle time that an even split of so many responses would use.

    Of R replicas b work on `left` responses, N of which there were at first. An even split would keep min(left, R)
    busy, and would leave R − min(N, R) without a response from the start, which no lengths are to blame for.
    """
    tp = _tp(stage, at, len(idle))
    working = (generating & stage.mesh[:, None]).sum(axis=0)
    replicas = (working + idle.sum(axis=0)) / tp
    never = np.maximum(replicas - len(stage.finished), 0.0)
    unused = np.maximum(np.minimum(left, replicas) - working / tp, 0.0)
    without = idle.sum(axis=0) / tp
    with np.errstate(invalid="ignore"):
        return np.where(idle, np.minimum((unused + never) / without, 1.0), 0.0)


def _tp(stage: _Stage, at: Floats, gpus: int) -> Floats:
    """TP of every GPU at every moment; of one that has not worked yet, the first of the stage."""
    degrees = np.full((gpus, len(at)), float(stage.layouts[0][2]))
    for moment, gpu, tp in stage.layouts:
        degrees[gpu, np.searchsorted(at, moment) :] = tp
    return degrees


def _busy(spans: pd.DataFrame, edges: Floats, gpus: int) -> Flags:
    """By GPU and piece of time between two of the edges: whether a span covers it."""
    change = np.zeros((gpus + 1, len(edges)), np.int32)
    first, count = spans["gpu"].to_numpy(np.int64), spans["gpus"].to_numpy(np.int64)
    begin = np.searchsorted(edges, np.maximum(spans["start_at"].to_numpy(np.float64), edges[0]))
    finish = np.searchsorted(edges, np.minimum(spans["end_at"].to_numpy(np.float64), edges[-1]))
    for row, sign in ((first, 1), (first + count, -1)):
        np.add.at(change, (row, begin), sign)
        np.add.at(change, (row, finish), -sign)
    covered: Flags = change.cumsum(axis=0).cumsum(axis=1)[:gpus, : len(edges) - 1] > 0
    return covered


def _running(calls: pd.DataFrame, at: Floats) -> NDArray[np.str_]:
    """The call that runs at each moment, of several the one that ends last."""
    names = np.full(len(at), "", dtype=object)
    for call in calls.sort_values(["end_at", "start_at"], ascending=[True, False]).to_dict("records"):
        names[np.searchsorted(at, call["start_at"]) : np.searchsorted(at, call["end_at"])] = call["call"]
    return names.astype(np.str_)


# ---- summaries ------------------------------------------------------------------------------------------------------


def idle_shares(causes: pd.DataFrame, steps: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Shares of GPU time: one row per case and system; columns `idle`, then one per cause, and `busy`.

    Means over the steady steps of all seeds, weighted by time: seconds over the seconds of these steps. `causes` are
    those of `idle_causes`.
    """
    total, causes = _steady_seconds(steps) * gpus, _steady(causes, steps)
    table = causes.pivot_table(index=["case", "system"], columns="cause", values="idle_s", aggfunc="sum")
    shares = table.reindex(index=total.index, columns=list(CAUSES)).fillna(0.0).div(total, axis=0)
    shares.insert(0, "idle", shares.sum(axis=1))
    return shares.assign(busy=1.0 - shares["idle"]).rename_axis(columns=None).reset_index()


def waits(causes: pd.DataFrame, steps: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Share of GPU time lost to stage barriers by the call waited for: case, system, waits_for, share (descending)."""
    keys, barrier = ["case", "system"], _steady(causes[causes["cause"] == "stage_barrier"], steps)
    idle_s = barrier.groupby([*keys, "waits_for"], sort=False)["idle_s"].sum().reset_index()
    table = idle_s.merge(_steady_seconds(steps).reset_index(), on=keys)
    table["share"] = table["idle_s"] / (table["total_s"] * gpus)
    return table[[*keys, "waits_for", "share"]].sort_values(
        [*keys, "share"], ascending=[True, True, False], ignore_index=True
    )


def _steady(causes: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    return causes.merge(steps.loc[steps["steady"], [*_RUN, "step"]], on=[*_RUN, "step"])


def _steady_seconds(steps: pd.DataFrame) -> pd.Series[float]:
    return steps[steps["steady"]].groupby(["case", "system"], sort=False)["step_time_s"].sum().rename("total_s")


# ---- what fits, and the parts of one run ----------------------------------------------------------------------------


def memory_by_tp(placed: PlacedExperiment) -> pd.DataFrame:
    """The rollout engine at every TP that divides a node, on the GPUs that it has, beside what others keep there.

    One row per TP. Bytes are GB (1e9) on each GPU: `weights_gb`, `activations_gb` (working memory of an iteration),
    `reserved_gb` (context, communication, graphs), `resident_gb` (what training and other models keep meanwhile),
    `kv_gb` (the KV cache: what is left of `budget_gb`). Of a replica: `kv_tokens`, `full_sequences` and
    `mean_sequences` (sequences of the longest prompt and the cap, and of mean length, that the cache holds), `replicas`
    and `sequences` (that a step gives each). `fits`: whether one full sequence does; `why_not` says what is lacking,
    `waits` whether a step's sequences of mean length are more than the cache or the engine takes at once.
    """
    try:
        plan, unplaced = placed.plan, ""
    except CapacityError as error:  # other calls do not fit: what generation needs is known nonetheless
        plan, unplaced = placed.unchecked_plan, str(error)
    loaded, cluster, gpus = placed.loaded, placed.loaded.cluster, len(placed.generation.gpus)
    left = len(placed.generation.nodes(cluster)[0])  # of a node; as many of each
    _, beside_bytes = placed.ledger_of(plan).staying(placed.generation.gpus)
    costs = rollout_costs(loaded, placed.generation.gpus, resident_bytes=beside_bytes)
    budget_bytes = loaded.experiment.memory_utilization * cluster.gpu_at(0).memory_bytes
    step, longest, rows = loaded.experiment.workflow.prompts * loaded.launched_responses, loaded.longest_sequence, []
    for tp in powers_of_two(cluster.domain_gpus):
        row: dict[str, object] = {"tp": tp, "replicas": gpus // tp, "fits": False, "waits": False}
        rows.append(row)
        if left % tp:
            row["why_not"] = f"TP {tp} does not divide the {left} GPUs of a node that generation has"
            continue
        try:
            memory = costs.memory(tp, min_tokens=-sys.maxsize)  # whatever is left, and be it less than nothing
        except ConfigError as error:
            row["why_not"] = str(error)
            continue
        tokens, sequences = memory.capacity_tokens, -(-step * tp // gpus)
        mean_sequences = max(int(tokens // loaded.batch.mean_tokens), 0)
        lacking = f"room for {tokens:,} tokens of KV at TP {tp}, a full sequence has {longest:,}"
        if memory.kv_bytes <= 0.0:
            lacking = f"weights and working memory exceed the budget by {-memory.kv_bytes / GB:.1f} GB"
        engine = memory.weight_bytes, memory.activation_bytes, memory.reserved_bytes
        sizes = budget_bytes, *engine, beside_bytes, max(memory.kv_bytes, 0.0)
        row |= dict(zip(_BYTES, (size / GB for size in sizes), strict=True)) | {
            "fits": tokens >= longest and not unplaced,
            "kv_tokens": max(tokens, 0),
            "full_sequences": max(tokens // longest, 0),
            "mean_sequences": mean_sequences,
            "sequences": sequences,
            "waits": sequences > min(mean_sequences, loaded.engine.max_num_seqs),
            "why_not": unplaced or lacking * (tokens < longest),
        }
    counts = ("kv_tokens", "full_sequences", "mean_sequences", "sequences", "waits", "why_not")
    return pd.DataFrame(rows, columns=["tp", "replicas", "fits", *_BYTES, *counts])


_BYTES = ("budget_gb", "weights_gb", "activations_gb", "reserved_gb", "resident_gb", "kv_gb")


def memory_by_call(placed: PlacedExperiment) -> pd.DataFrame:
    """The calls beside generation, on each of their GPUs in GB: one row per call.

    `kept_gb` between its runs, `working_gb` only while it runs, `total_gb` on the fullest GPU while it runs with all
    that others keep there, `gpu_gb` what the GPU has, `fits`.
    """
    loaded, ledger, found = placed.loaded, placed.ledger_of(placed.unchecked_plan), []
    for name in ledger.phases:
        gpu, rows = ledger.fullest(name)
        kept = total(row for row in rows if row.holder == name and row.stays)
        working = total(row for row in rows if row.holder == name and not row.stays) - RESERVED_BYTES
        gpu_bytes, model = loaded.cluster.gpu_at(gpu).memory_bytes, loaded.models[placed.workflow.call(name).model]
        sizes = [size / GB for size in (kept, working, total(rows), gpu_bytes)]
        found.append((name, model.name, *sizes, total(rows) <= gpu_bytes))
    return pd.DataFrame(found, columns=["call", "model", "kept_gb", "working_gb", "total_gb", "gpu_gb", "fits"])


@dataclass(frozen=True)
class Parts:
    """Tables of one run: `idle` (`idle_shares`), what stage barriers wait for (`waits`), and what fits: the engine by
    TP (`memory_by_tp`), the other calls (`memory_by_call`)."""

    idle: pd.DataFrame
    waits: pd.DataFrame
    memory: pd.DataFrame
    memory_calls: pd.DataFrame

    def as_json(self) -> dict[str, Any]:
        return {name: json.loads(frame.to_json(orient="records")) for name, frame in vars(self).items()}


def parts_of(loaded: LoadedExperiment, folder: Path, run: Run) -> Parts:
    """The parts of an experiment's baseline, run as `run` says."""
    simulator = simulator_of(loaded.experiment, folder, run)
    spec = baseline_of(loaded.experiment.systems, loaded.experiment.baseline)
    tables, gpus = tables_of(simulator, spec, run.seed), loaded.cluster.gpus
    own = {name: tables[name] for name in ("steps", "spans", "responses", "stays", "calls")}
    causes = idle_causes(**own, gpus=gpus)
    placed = simulator.placed(spec.make())
    return Parts(
        idle_shares(causes, own["steps"], gpus).drop(columns=["case", "system"]),
        waits(causes, own["steps"], gpus).drop(columns=["case", "system"]),
        memory_by_tp(placed),
        memory_by_call(placed),
    )
