"""Names of the catalogue for what other programs call by other names: models, clusters, calibrations, traces."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rlsim.base import catalogue
from rlsim.base.reading import is_file, plain, read_yaml
from rlsim.base.refusals import refuse
from rlsim.base.schema import validate
from rlsim.cost.calibration import Engine, calibration_names, load_calibration
from rlsim.errors import CatalogueError, ConfigError
from rlsim.experiment.build import beside
from rlsim.models.hardware import Cluster, Gpu, load_cluster, load_gpu, node_types
from rlsim.models.model import Model, load_model
from rlsim.models.names import known_shape, short_name
from rlsim.trace import Trace, read_trace

_MODEL_NAME = re.compile(r"((?:llama|qwen|deepseek|mistral)[\w.-]*?)-(\d+(?:\.\d+)?)B", re.IGNORECASE)


def find_model(name: str, folder: Path, *, option: str = "--model") -> tuple[str, str]:
    """A model as an experiment in `folder` names it, and what to say about the choice ("" if nothing).

    `name` is a name of the catalogue, a Hugging Face name or the path of a checkpoint: its `config.json` if it is
    there, else the name at its end. Raises `CatalogueError` for one whose shape is not known, which offers `option`.
    """
    path = Path(name).expanduser()
    for config in (path, path / "config.json"):
        if is_file(config) and config.suffix in (".json", ".yaml", ".yml"):
            load_model(config)  # says what is wrong with it
            inside = os.path.relpath(config.resolve(), folder.resolve())  # if it lies at or below the folder
            return str(config.resolve()) if inside.startswith("..") else inside, ""
    if name.endswith((".json", ".yaml", ".yml")):
        raise ConfigError(f"{name}: no such file")
    found = known_shape(name)
    if found is None:
        near = difflib.get_close_matches(short_name(name).lower(), sorted(catalogue.names("models")), n=3, cutoff=0.5)
        nearest = f"the nearest of the catalogue: {', '.join(near)}; " if near else ""
        raise CatalogueError(
            f"model {name!r}: its shape is not known; {nearest}give {option} a name of `rlsim list models`, or the "
            "path of its config.json"
        )
    return found


# ---- clusters and calibrations --------------------------------------------------------------------------------------


def find_cluster(gpu: str | None, nodes: int, per_node: int, *, network: bool = False) -> Cluster:
    """The cluster of `nodes` × `per_node` such GPUs, as nodes of the catalogue; an experiment writes its name.

    As many GPUs on more nodes, if the GPU's own nodes have fewer and so many fill them. Raises `ConfigError` if no GPU
    is named, and `CatalogueError` if the catalogue has no such GPU, nodes or link (unless that `network` is given).
    """
    kinds = node_types()
    size = f"{nodes}x{per_node}" if nodes > 1 else f"{per_node}"
    if gpu is None:
        fitting = [kind for kind, node in kinds.items() if per_node <= node.gpus_per_node]
        usual = ", ".join(f"{size}x{kind}" for kind in fitting if nodes == 1 or kinds[kind].inter)
        raise ConfigError(
            "which GPUs are they? The configuration does not say: give --gpu "
            f"({', '.join(catalogue.names('gpus'))}) or --cluster ({usual})"
        )
    kind = _kind(gpu)
    most = kinds[kind].gpus_per_node
    if per_node > most and nodes * per_node % most == 0:
        size = f"{nodes * per_node // most}x{most}"
    if network and kinds[kind].inter is None:
        inter = {"name": "network", "bytes_per_s": 1e9, "latency_s": "5 us"}  # until its rate is put in
        keys = _keys_of_nodes(kind) | {"name": f"{size}x{kind}", "inter": inter}
        counts = [int(one) for one in reversed(size.split("x"))]
        return load_cluster(keys | dict(zip(("gpus_per_node", "nodes"), counts, strict=False)))
    return load_cluster(f"{size}x{kind}")


def node_gpus(gpu: str) -> int:
    """The GPUs of a node of the catalogue; raises as `find_cluster`."""
    return node_types()[_kind(gpu)].gpus_per_node


def _kind(gpu: str) -> str:
    """The name in the catalogue of the nodes of a GPU: its name whole or, where only one begins that way, its first
    words."""
    fitting = [one for one in catalogue.names("gpus") if f"{one}-".startswith(f"{gpu.lower()}-")]
    try:
        described = load_gpu(fitting[0] if len(fitting) == 1 else gpu).name
    except CatalogueError as error:
        how = f"--gpu {gpu} --gpu-like h100,48GB,864GB/s,362TFLOP/s"
        raise CatalogueError(f"{error}; another GPU is described by the one that it is like: {how}") from None
    kind = next((kind for kind, node in node_types().items() if node.gpu.name == described), None)
    if kind is None:
        raise ConfigError(f"the catalogue has no cluster of {described}: spell one out in YAML and give --cluster FILE")
    return kind


def _keys_of_nodes(kind: str) -> dict[str, Any]:
    path = next(path for name, path in catalogue.names("clusters").items() if name.partition("x")[2] == kind)
    return plain(read_yaml(path))  # type: ignore[no-any-return]


def spelled_out(found: Cluster, described: Sequence[str], network: str | None) -> dict[str, Any]:
    """A cluster of the catalogue by its keys, with the name and figures of another GPU, and another network of a node.

    `described` has the name, then the GPU's memory, bandwidth and FLOP/s in any order, told by their units; what it
    lacks stays as it is. `network` is the rate of a node's ports together.
    """
    gpus, name = catalogue.names("gpus"), next(iter(described), "")
    refuse("GPU or network as given", name=name, network=network or "", taken={*node_types(), *gpus})
    kind = found.name.lstrip("0123456789x")
    keys = _keys_of_nodes(kind)
    keys |= {name: getattr(found, name) for name in ("nodes", "gpus_per_node", "nodes_per_domain")}
    if found.inter is None and network is None:
        keys.pop("inter", None)
    elif network is not None:
        rate = network if network.endswith("/s") else f"{network}/s"
        port = {"name": "network", "bytes_per_s": rate, "shared_by_gpus": found.gpus_per_node}
        keys["inter"] = {"latency_s": "5 us", **keys.get("inter", {}), **port}
    if not described:
        return keys | {"name": found.name}
    figures = described[1:]
    told = dict(_figure(text) for text in figures)
    gpu = plain(read_yaml(gpus[found.gpu.name])) | told
    gpu |= {"name": name, "title": name, "like": found.gpu.name, "source": f"given: {', '.join(figures) or 'nothing'}"}
    if "bf16_flop_per_s" in told:  # FP8 in proportion
        times = validate(gpu, Gpu, "--gpu-like").bf16_flop_per_s / found.gpu.bf16_flop_per_s
        lower = {key: getattr(found.gpu, key) for key in ("fp8_flop_per_s", "fp4_flop_per_s")}
        gpu |= {key: f"{rate * times / 1e12:.4g} TFLOP/s" for key, rate in lower.items() if rate}
    return keys | {"name": found.name.replace(kind, name), "gpu": gpu}


def _figure(text: str) -> tuple[str, str]:
    """The key of a GPU that a figure is of, by its unit, and the figure."""
    if not re.fullmatch(r"[\d.]+ ?([KMGTP]i?B(/s)?|[KMGTP]b/s|[TP](FLOPS?(/s)?)?)", text, re.IGNORECASE):
        what = "memory (48GB), its bandwidth (864GB/s) or bf16 FLOP/s (362TFLOP/s)"
        raise ConfigError(f"--gpu-like …,{text}: not a figure with a unit; expected {what}")
    if "FLOP" not in text.upper() and text.endswith(("B", "B/s", "b/s")):
        return "memory_bytes" if text.endswith("B") else "memory_bytes_per_s", text
    return "bf16_flop_per_s", f"{text}FLOP/s" if re.fullmatch(r"[\d.]+[TP]", text) else text


def find_calibration(gpu: str, engine: str) -> tuple[str, str]:
    """The shipped calibration of a GPU under an engine, or the GPU's nearest other one and what to say about it."""
    engines = [one for one in get_args(Engine) if f"{gpu}-{one}" in calibration_names()]
    if engine in engines:
        return f"{gpu}-{engine}", ""
    if not engines:
        load_calibration(f"{gpu}-{engine}")  # which says why there is none
    other = "vllm" if "vllm" in engines else engines[0]
    return f"{gpu}-{other}", f"no calibration of {gpu} under {engine} is shipped: that of {other} is taken"


def check_calibration(name: str, cluster: Cluster, folder: Path) -> None:
    """Raises `ConfigError` if the calibration, as an experiment in `folder` names it, is not for the cluster's GPU."""
    found = load_calibration(beside(name, folder))
    if found.gpu not in (cluster.gpu.name, cluster.gpu.like):
        raise ConfigError(f"calibration {name} is for {found.gpu}, cluster {cluster.name} has {cluster.gpu.name}")


# ---- traces ---------------------------------------------------------------------------------------------------------


def nearest_trace(model: Model, cap: int, *, rewards: bool) -> tuple[str, Trace, str]:
    """The shipped trace whose model and cap are nearest, and why; with `rewards`, one that tells right from wrong.

    Traces of judged answers and sandboxed code are left out: they need more than lengths.
    """
    found = []
    for name, path in catalogue.names("traces", ".parquet").items():
        trace = read_trace(path)
        columns = set(trace.frame.columns)
        if columns & {"judge_tokens", "test_run_s"} or (rewards and not columns & {"correct", "reward"}):
            continue
        all_cut = 100.0 * (trace.cut(cap)[1].mean() > 0.9)  # such lengths come last: they say nothing
        short = max(math.log2(cap / (trace.meta.cap_tokens or cap)), 0.0)
        found.append((short + all_cut + _distance(model, trace), name, trace))
    _, name, trace = min(found, key=lambda item: (item[0], item[1]))
    described = _models_of(trace)
    whose = f" ({described[0][0]}-{described[0][1]:g}B)" if described else ""
    return name, trace, f"the shipped trace whose model{whose} and cap are nearest; give --trace for your own lengths"


def _models_of(trace: Trace) -> Sequence[tuple[str, float]]:
    text = str((trace.meta.recipe or {}).get("description", ""))
    return [(family, float(size)) for family, size in _MODEL_NAME.findall(text)]


def _distance(model: Model, trace: Trace) -> float:
    """How unlike the models are: doublings of size, and more for another family."""
    described = _models_of(trace)
    if not described:
        return 10.0
    family, size = described[0]
    kin = model.model_type.partition("_")[0].rstrip("0123456789")
    distill = "r1" in family.lower()
    other = 0.0 if kin in family.lower() and not distill else 2.0
    if distill and ("r1" in model.name or "thinking" in model.name):
        other = -1.0
    return other + abs(math.log2(model.parameters / 1e9 / size))
