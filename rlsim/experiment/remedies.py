"""Settings with which a call that does not fit needs less memory: each is tried before it is advised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rlsim.errors import RlsimError
from rlsim.experiment.build import LoadedExperiment
from rlsim.hardware import Cluster


def advice(loaded: LoadedExperiment, needed_bytes: float, bytes_needed: Callable[[LoadedExperiment], float]) -> str:
    """The settings that bring a figure of `needed_bytes` down, with what it becomes, as the end of a message.

    `bytes_needed` gives the figure under a changed experiment, or raises `RlsimError` where that cannot be. Empty where
    nothing helps.
    """
    found = []
    for setting, changed in _changes(loaded):
        try:
            less_bytes = bytes_needed(changed)
        except RlsimError:
            continue
        if less_bytes < needed_bytes:
            found.append((less_bytes, setting))
    listed = ", ".join(f"{setting} ({size / 1e9:.2f} GB)" for size, setting in sorted(found))
    return f"; it needs less with {listed}" if listed else ""


def _changes(loaded: LoadedExperiment) -> Iterator[tuple[str, LoadedExperiment]]:
    """Every setting that memory may depend on, one changed at a time."""
    experiment, training, cluster = loaded.experiment, loaded.experiment.training, loaded.cluster
    settings: dict[str, object] = {
        "micro_batch_tokens": max(training.micro_batch_tokens // 2, 1),
        "cp": 2 * training.cp,
        "tp": min(2 * training.tp, cluster.domain_gpus),
        "pp": 2 * training.pp,
        "ep": max(2 * training.ep, cluster.gpus_per_node),
        "zero_stage": 3 if training.pp == 1 else 1,
        "recompute": "full",
        "fused_kernels": True,
        "offload": True,
    }
    for key, value in settings.items():
        changed = experiment.model_copy(update={"training": training.model_copy(update={key: value})})
        yield f"training.{key}={str(value).lower()}", replace(loaded, experiment=changed)
    if isinstance(cluster, Cluster):  # of several kinds it is not said which to add
        more = cluster.model_copy(update={"nodes": 2 * cluster.nodes})
        yield f"{more.nodes} nodes instead of {cluster.nodes}", replace(loaded, cluster=more)
