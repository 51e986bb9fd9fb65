"""What a framework can set (the rows of `rlsim/data/frameworks/space.yaml` that count for an experiment), within which
bound of staleness."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from rlsim.base.reading import shipped
from rlsim.base.refusals import holds, worth
from rlsim.cost.speculation import ACCEPTANCE
from rlsim.errors import ConfigError, unknown_name
from rlsim.experiment.build import LoadedExperiment
from rlsim.experiment.systems import SystemSpec, parse_systems

#: Budgets of tokens to try, over the longest sequence.
_BUDGETS = (1, 1.5, 2, 3, 4, 6, 8)
#: What a change may be beside a change of speed, and the words for it.
ALTERS: Mapping[str, str] = {
    "numerics": "computes in other number formats",
    "algorithm": "changes which log-probs the loss sees",
    "staleness": "trains on responses of older weights",
    "gpus": "takes another number of GPUs",
    "drafts": f"drafts tokens, accepted as assumed ({ACCEPTANCE['eagle3']} of each, n-grams {ACCEPTANCE['ngram']})",
}


class Axis(NamedTuple):
    """One thing that may be set: every option is what it sets, by key."""

    name: str
    options: tuple[Mapping[str, Any], ...]
    alters: str = ""


def axes_of(
    loaded: LoadedExperiment, allow: Collection[str] = (), keep: Collection[str] = (), most_gpus: int | None = None
) -> tuple[Axis, ...]:
    """The axes of an experiment's framework, without those whose keys are to be kept, and those that alter what is not
    allowed (`ALTERS`); numbers of GPUs up to `most_gpus`."""
    functions = {"divisors": divisors, "range": range, "token_budgets": token_budgets}
    facts = facts_of(loaded) | {"most_gpus": most_gpus or loaded.cluster.gpus, **functions}
    facts["node_counts"] = [one for one in (1, 2, 4, 8, 16, 32) if _is_size(one, facts)]
    facts["spread"] = partial(spread, gpus_per_node=loaded.cluster.gpus_per_node)
    return tuple(_axes(_rows(loaded.experiment.framework), facts, allow, keep))


def check_keys(loaded: LoadedExperiment, keys: Collection[str]) -> None:
    """Raises `ConfigError` for a key that no row of the experiment's framework sets."""
    known = [key for row in _rows(loaded.experiment.framework) for key in (row.get("set") or (row["key"],))]
    for key in (key for key in keys if key not in known):
        raise ConfigError(str(unknown_name("key to keep", key, known)))


def _rows(framework: str) -> Any:
    return shipped("frameworks/space.yaml").get(framework.partition(" ")[0], ())


def _axes(rows: Any, facts: Mapping[str, Any], allow: Collection[str], keep: Collection[str]) -> Iterator[Axis]:
    for row in rows:
        sets = row.get("set") or {row["key"]: "value"}
        alters = row.get("alters", "")
        if alters not in ("", *allow) or set(sets) & set(keep) or not holds(row.get("when", "True"), facts):
            continue
        values = worth(row["values"], facts) if isinstance(row["values"], str) else row["values"]
        options = tuple({key: worth(of, {**facts, "value": value}) for key, of in sets.items()} for value in values)
        if options:
            yield Axis(" + ".join(sets), options, alters)


def divisors(count: int) -> list[int]:
    """Powers of two that divide a number of GPUs."""
    return [one for one in (2**power for power in range(11)) if one <= count and count % one == 0]


def token_budgets(longest: int) -> list[int]:
    """Tokens of a micro-batch: multiples of the longest sequence, in whole KiB."""
    return [1024 * math.ceil(longest * times / 1024) for times in _BUDGETS]


def spread(count: int, nodes: int, gpus_per_node: int) -> tuple[int, int]:
    """So many GPUs as nodes and GPUs of each: whole nodes, or else as many of each of `nodes`."""
    return (nodes, count // nodes) if count % gpus_per_node else (count // gpus_per_node, gpus_per_node)


def _is_size(nodes: int, facts: Mapping[str, Any]) -> bool:
    """Whether all that has GPUs of its own can have the same share of them on so many nodes."""
    own = [facts["train_gpus"], facts["rollout_gpus"], *facts["others"].values()] if facts["apart"] else []
    sides = [divmod(count * nodes, facts["nodes"]) for count in own]
    whole = (not rest and (count % facts["gpus_per_node"] == 0 or count % nodes == 0) for count, rest in sides)
    return nodes * facts["gpus_per_node"] <= facts["most_gpus"] and all(whole)


def facts_of(loaded: LoadedExperiment) -> dict[str, Any]:
    """What the conditions and values of the table may ask for."""
    experiment, cluster = loaded.experiment, loaded.cluster
    training, gpu = experiment.training, cluster.gpu_at(0)
    spec = baseline_of(experiment.systems, experiment.baseline)
    parameters = {name: value for part in spec.parts for name, value in part.parameters.items()}
    policies = {part.policy for part in spec.parts}
    own = parameters.get("rollout_gpus")
    rollout_gpus = own if isinstance(own, int) else cluster.gpus
    others = parameters.get("apart") or {}
    engine = loaded.kind((0,)).calibration.engine
    tp = parameters.get("tp")
    drafts = experiment.engine.speculation
    most_drafted = len(drafts.acceptance) if drafts and isinstance(drafts.acceptance, tuple) else 64
    named = re.fullmatch(r"(?:\d+x)?\d+x(.+)", experiment.cluster) if isinstance(experiment.cluster, str) else None
    return {
        "gpus": cluster.gpus, "nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node,
        "domain_gpus": min(cluster.domain_gpus, cluster.gpus), "engine": engine, "tp": tp if isinstance(tp, int) else 1,
        "rollout_gpus": rollout_gpus, "train_gpus": cluster.gpus - rollout_gpus - sum(others.values()) or cluster.gpus,
        "others": others,
        "apart": own is not None, "eta": "eta" in parameters,
        "fully": bool({"verl_fully_async", "skyrl_async"} & policies),
        "v1": "verl_fully_async" in policies and parameters.get("per_replica", 0) is None,
        "release": float(experiment.framework.partition(" ")[2] or math.inf),
        "updates": training.mini_batches, "rewarded": "reward" in loaded.models, "critic": "critic" in loaded.models,
        "megatron": training.backend == "megatron", "fsdp": training.backend == "fsdp",
        "dynamic": training.micro_batch_sequences is None, "experts": loaded.model.num_experts > 0,
        "cpu_optimizer": training.cpu_optimizer > 0,
        "acts": loaded.environment is not None,
        "sandboxes": experiment.environment.sandboxes, "trajectories": experiment.workflow.batch,
        "drafts": drafts is not None, "most_drafted": most_drafted, "chain": not (drafts and drafts.num_draft_tokens),
        "mtp": drafts is not None and drafts.method == "mtp",
        "fp8": gpu.fp8_flop_per_s is not None, "hopper": gpu.name.startswith(("h100", "h200", "h800", "h20")),
        "longest": loaded.longest_sequence, "prompts": experiment.workflow.prompts,
        "beside_tp": experiment.engine.pp * experiment.engine.data_parallel_attention,
        "kind": named[1] if named else "", **{name: engine == name for name in ("vllm", "sglang", "trtllm")},
    }  # fmt: skip


def baseline_of(systems: Any, baseline: str | None) -> SystemSpec:
    """The system of an experiment that is tuned: its baseline."""
    specs = parse_systems(systems)
    return next((spec for spec in specs if spec.name == baseline), specs[0])


#: Of what a bound may be: the mean of the responses trained on, 95% of them, or each.
KINDS = ("mean", "p95", "max")


class Bound(NamedTuple):
    """So many updates of staleness at most, as `--max-staleness` has it: `mean:1`, `p95:2`, `max:1` or `1`."""

    kind: str
    most: float

    @classmethod
    def of(cls, given: str) -> Bound:
        """Raises `ConfigError` for what is no bound."""
        kind, colon, number = given.partition(":")
        kind, number = (kind, number) if colon else ("max", kind)
        if kind not in KINDS:
            raise unknown_name("kind of staleness bound", kind, KINDS)
        try:
            most = float(number)
        except ValueError:
            most = math.nan
        if not 0 <= most < math.inf:
            raise ConfigError(f"max_staleness: expected updates, 0 or more, got {given!r} (or mean:1, p95:2, max:1)")
        return cls(kind, most)

    def kept(self, means: Mapping[str, float]) -> bool:
        """Whether a run kept it, by its means; to a tenth of an update."""
        return round(means.get(f"staleness_{self.kind}", 0.0), 1) <= self.most
