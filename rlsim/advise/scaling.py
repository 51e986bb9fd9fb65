"""How many GPUs pay: the best systems at half, the same, twice, … the GPUs, on the same responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from rlsim.experiment.result import Result
from rlsim.experiment.summary import mean_ratio, means, paired_ratio
from rlsim.hardware import Cluster, node_types, spread_evenly

#: A doubling of the GPUs pays while it is at least so many times as fast: the added ones do half of what the others do.
WORTH = 1.5
#: Whose nodes' link joins those of a GPU of which the catalogue knows no link between nodes.
LENDER = "h100"


def sizes(cluster: Cluster, most: int) -> list[int]:
    """Numbers of GPUs to try beside the cluster's own: half as many, then doublings up to `most` times.

    Half is left out where it is neither whole nodes nor part of one.
    """
    half, odd = divmod(cluster.gpus, 2)
    fits = not odd and (half < cluster.gpus_per_node or half % cluster.gpus_per_node == 0)
    return [*([half] if fits else []), *(cluster.gpus << i for i in range(1, most.bit_length()))]


def shape(cluster: Cluster, gpus: int) -> tuple[int, int]:
    """Nodes and GPUs per node: nodes stay as they are while at least one is full; fewer GPUs are one smaller node."""
    return max(gpus // cluster.gpus_per_node, 1), min(gpus, cluster.gpus_per_node)


def resized(cluster: Cluster, gpus: int) -> tuple[dict[str, Any], str]:
    """The cluster with so many GPUs, as an experiment spells it, and what was assumed."""
    nodes, per_node = shape(cluster, gpus)
    domain = spread_evenly(nodes, cluster.nodes_per_domain)
    spelled: dict[str, Any] = {"name": f"{nodes}x{per_node}x{cluster.gpu.name}", "gpu": cluster.gpu.model_dump()}
    spelled |= {"nodes": nodes, "gpus_per_node": per_node, "nodes_per_domain": domain}
    inter, assumed = cluster.inter, ""
    if nodes > domain and inter is None:
        kinds = [kind for kind, node in node_types().items() if node.gpu.name == cluster.gpu.name and node.inter]
        lender = node_types()[kinds[0] if kinds else LENDER]
        inter = lender.inter
        assumed = f"{cluster.name} has one node: the link between several is taken from 2x{lender.name}"
    for key, link in (("intra", cluster.intra), ("inter", inter if nodes > 1 else None), ("host", cluster.host)):
        if link is not None:
            spelled[key] = link.model_dump()
    return spelled, assumed


def scaling_rows(result: Result, gpus: int) -> pd.DataFrame:
    """Every system and seed of a result on `gpus` GPUs: system, seed, gpus, step_time_s (mean), rates per second."""
    columns = ["step_time_s", "responses_per_s", "tokens_per_s"]
    return means(result.steps, ["system", "seed"])[columns].reset_index().assign(gpus=gpus)


def scaling(rows: pd.DataFrame, worth: float = WORTH) -> pd.DataFrame:
    """What each number of GPUs brings, from `scaling_rows` of several results.

    One row per `gpus` and `system`, `best` the fastest there: `step_time_s`, `gpu_s_per_step`, `responses_per_s`,
    `tokens_per_s`, `tokens_per_gpu_s`; against half as many GPUs, of the same system: `doubling` (how many times as
    many trained responses per second) with its 95% interval `doubling_low` to `doubling_high`, `marginal` (what the
    added GPUs do, as a share of the others: doubling − 1), and `pays` (doubling ≥ `worth`; missing for the fewest).
    """
    found = []
    groups: dict[Any, pd.DataFrame] = dict(iter(rows.set_index("seed").groupby(["system", "gpus"], sort=False)))
    for (system, gpus), own in groups.items():
        rate, half = own["responses_per_s"], groups.get((system, gpus / 2))
        doubling, low, high = paired_ratio(rate, rate.iloc[:0] if half is None else half["responses_per_s"])
        whole = _of_all_seeds(own)
        step_s, tokens_per_s = whole["step_time_s"], whole["tokens_per_s"]
        found.append(
            {
                "gpus": gpus,
                "system": system,
                "step_time_s": step_s,
                "gpu_s_per_step": gpus * step_s,
                "responses_per_s": whole["responses_per_s"],
                "tokens_per_s": tokens_per_s,
                "tokens_per_gpu_s": tokens_per_s / gpus,
                "doubling": doubling,
                "doubling_low": low,
                "doubling_high": high,
                "marginal": doubling - 1.0,
                "pays": None if half is None else doubling >= worth,
            }
        )
    table = pd.DataFrame(found).sort_values(["gpus", "responses_per_s"], ascending=[True, False], ignore_index=True)
    table.insert(2, "best", ~table["gpus"].duplicated())
    return table


def _of_all_seeds(own: pd.DataFrame) -> dict[str, float]:
    """What `rlsim.experiment.summary.means` makes of all steps of a system: rates are what was done over the time.

    All seeds have as many steps, so that is the mean over seeds, weighted with their time.
    """
    times = own["step_time_s"]
    rates = {name: float(np.average(own[name], weights=times)) for name in ("responses_per_s", "tokens_per_s")}
    return {"step_time_s": float(times.mean()), **rates}


def best_doublings(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest system at each number of GPUs against the fastest at half: gpus, system, doubling, marginal.

    Fastest by the geometric mean over seeds, and `doubling` that of the seeds' ratios, as rankings and speedups are.
    """
    rates = rows.set_index("seed").groupby(["gpus", "system"])["responses_per_s"]
    typical = rates.agg(lambda own: mean_ratio(own.tolist())[0]).unstack()
    fastest: dict[Any, Any] = typical.idxmax(axis=1).to_dict()
    best = {gpus: (name, rates.get_group((gpus, name))) for gpus, name in fastest.items()}
    found = []
    for gpus, (system, own) in best.items():
        half = best[gpus // 2][1] if gpus / 2 in best else own.iloc[:0]
        doubling = paired_ratio(own, half)[0]
        found.append({"gpus": gpus, "system": system, "doubling": doubling, "marginal": doubling - 1.0})
    return pd.DataFrame(found)


def enough(best: pd.DataFrame, worth: float = WORTH) -> tuple[int, bool]:
    """The number of GPUs beyond which more do not pay, and whether more than that were tried.

    It is the last one that every doubling up to it was worth, from the fewest on.
    """
    reached = int(best["gpus"].iloc[0])
    for gpus, doubling in zip(best["gpus"].iloc[1:], best["doubling"].iloc[1:], strict=True):
        if not doubling >= worth:
            return reached, True
        reached = int(gpus)
    return reached, False
