"""Clusters of several kinds of GPU: generation on one, training on another, each at its own rates."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import Command, loaded_of, tables
from ruamel.yaml import YAML

import rlsim
from rlsim.cost.calibration import load_calibration
from rlsim.cost.collectives import Collectives
from rlsim.cost.fits import ACROSS
from rlsim.cost.layout import Layout
from rlsim.cost.reallocation import DataTransfer, Reallocation, Side
from rlsim.cost.weight_sync import FITTED, WeightSync
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.plan_report import search_plan
from rlsim.experiment.result import Result, read_result
from rlsim.experiment.simulator import Simulator
from rlsim.experiment.systems import parse_systems
from rlsim.frameworks.parts import Options
from rlsim.models.hardware import MixedCluster, load_any_cluster, load_cluster
from rlsim.models.model import load_model
from rlsim.results.report.page import setups_of
from rlsim.results.tune.answer import tune
from rlsim.results.tune.trial import Configuration

MIXED = "2x8xh20+1x8xh100"
KINDS = {"h20": "h20-vllm", "h100": "h100-vllm"}
SPLIT: dict[str, Any] = {"name": "split", "use": [{"verl": {"tp": 4}}, "split"]}
EXPERIMENT: dict[str, Any] = tables("bases")["kinds"]
TABLES = ("steps", "calls", "responses", "spans", "stays", "switches")


def run(**changes: Any) -> Result:
    return rlsim.run(EXPERIMENT | changes)


def assert_same(one: Result, other: Result) -> None:
    for table in TABLES:
        pd.testing.assert_frame_equal(getattr(one, table), getattr(other, table), check_exact=True)


# The cluster ---------------------------------------------------------------------------------------------------------


def test_gpus_are_numbered_on_from_group_to_group() -> None:
    cluster = load_any_cluster("2x8xH20+8xh100")
    assert isinstance(cluster, MixedCluster)
    assert (cluster.name, cluster.nodes, cluster.gpus, cluster.kinds) == ("2x8xh20+8xh100", 3, 24, ("h20", "h100-sxm"))
    assert [cluster.gpu_at(number).name for number in (0, 15, 16, 23)] == ["h20", "h20", "h100-sxm", "h100-sxm"]
    assert [cluster.node_of(number) for number in (0, 15, 16, 23)] == [0, 1, 2, 2]
    slow, fast = cluster.around([0, 15]), cluster.around([16])
    assert (slow.gpu.name, slow.gpus, slow.node_of(16)) == ("h20", 24, 2)
    assert (fast.intra, fast.inter) == (load_cluster("2x8xh100").intra, load_cluster("2x8xh100").inter)
    assert load_any_cluster(cluster.model_dump(mode="json")) == cluster
    systems = ["verl", SPLIT, "one_step_off"]
    given = ("2x8xh100", "h100-vllm"), ("1x8xh100+1x8xh100", "h100-vllm"), ("2x8xh100", KINDS)
    whole, *others = (run(cluster=cluster, calibration=fits, systems=systems) for cluster, fits in given)
    for other in others:
        assert_same(whole, other)
        assert whole.manifest["lookups"] == other.manifest["lookups"]


def test_a_mixed_cluster_is_spelled_out_by_its_groups(tmp_path: Path) -> None:
    h100 = load_cluster("2x8xh100").model_dump(mode="json") | {"nodes": 1}
    spelled = load_any_cluster({"name": "2x8xh20+1x8xh100", "groups": ["2x8xh20", h100 | {"name": "8xh100"}]})
    assert spelled == load_any_cluster("2x8xh20+1x8xh100").model_copy(update={"groups": spelled.groups})
    YAML().dump(spelled.model_dump(mode="json"), tmp_path / "mine.yaml")
    assert load_any_cluster(str(tmp_path / "mine.yaml")) == spelled


def test_what_knows_one_kind_only_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rlsim init or calibrate needs nodes of one kind; cluster .* h20, h100-sxm"):
        load_cluster(MIXED)
    with pytest.raises(ConfigError, match="a search for a plan needs nodes of one kind"):
        search_plan(EXPERIMENT, evaluations=1)
    path = tmp_path / "mixed.yaml"
    path.write_text(json.dumps(EXPERIMENT))
    with pytest.raises(ConfigError, match="rlsim tune needs nodes of one kind"):
        tune(Configuration("", (str(path),), Options(tmp_path)))


# Costs ---------------------------------------------------------------------------------------------------------------


def test_each_side_is_as_fast_as_on_a_cluster_of_its_kind() -> None:
    """With equal GPUs on a side its calls take as long, and the sync as long as the trainer's: both have one link."""
    apart = {**SPLIT, "use": [{"verl": {"tp": 4}}, {"split": {"rollout_gpus": 16}}]}
    mixed = run()
    slow, fast = (
        run(cluster=f"3x8x{kind}", calibration=f"{kind}-vllm", systems=[apart]).calls.assign(
            took_s=lambda calls: calls["end_at"] - calls["start_at"]
        )
        for kind in ("h20", "h100")
    )
    calls = mixed.calls.assign(took_s=mixed.calls["end_at"] - mixed.calls["start_at"])
    generates = calls["kind"] == "generate"
    assert calls[generates]["gpus"].eq(16).all()
    assert calls[calls["kind"] == "train"]["gpus"].eq(8).all()
    assert calls[generates]["took_s"].tolist() == pytest.approx(slow[generates]["took_s"].tolist(), rel=1e-12)
    assert calls[~generates]["took_s"].tolist() == pytest.approx(fast[~generates]["took_s"].tolist(), rel=1e-12)
    for other, same in ((slow, ~generates & (calls["kind"] != "reward")), (fast, generates)):
        assert (calls[same]["took_s"] - other[same]["took_s"]).abs().max() > 0.05, "and not as on the other kind"


def side(cluster: str, calibration: str) -> Side:
    found, fits = load_cluster(cluster), load_calibration(calibration)
    return Side(found, Collectives(fits.collectives, fits.reference, found))


def test_between_kinds_the_slower_network_binds() -> None:
    model, here, there = load_model("qwen2.5-7b"), Layout(first_gpu=0, dp=8), Layout(first_gpu=8, dp=8)
    h100, a40 = side("2x8xh100", "h100-sglang"), side("2x8xa40", "a40-sglang")

    def sync(one: Side, rollout: Side | None, method: str = "bucketed") -> float:
        made = WeightSync(
            model=model,
            cluster=one.cluster,
            collectives=one.collectives,
            engine="vllm",
            rollout=rollout and rollout.cluster,
            method=method,
        )
        return made.parts(here, there).transport_s

    for method in ("bucketed", "multi_sender"):
        assert sync(h100, a40, method) == sync(a40, h100, method) == sync(a40, None, method)
        assert sync(a40, None, method) > 3.9 * sync(h100, None, method)

    one, other = Layout(first_gpu=0), Layout(first_gpu=8)
    handed_on = [DataTransfer(*a, b).time_s(1e9, one, other) for a, b in ((h100, a40), (a40, h100), (a40, None))]
    assert handed_on == [handed_on[2]] * 3
    moved = {(a, b): Reallocation(model, *a, b).time_s(here, there) for a, b in ((h100, a40), (a40, h100), (a40, None))}
    network_s = model.weight_bytes / (ACROSS.efficiency * 12.5e9)
    assert moved[h100, a40] == moved[a40, None] > 1.1 * network_s, "A40s pass it on over PCIe, which takes longer"
    assert moved[a40, h100] == pytest.approx(network_s, rel=2e-3), "H100s pass it on as fast as it comes"


def test_weights_are_loaded_by_the_engine_that_generates() -> None:
    vllm, sglang = (
        run(calibration=KINDS | {"h20": f"h20-{engine}"}).calls.query("kind == 'sync'")["weights_s"].max()
        for engine in ("vllm", "sglang")
    )
    weight_bytes = load_model("llama-3.1-8b").weight_bytes
    assert sglang - vllm == pytest.approx(FITTED.sglang_s + weight_bytes / FITTED.sglang_bytes_per_s)


def test_memory_is_that_of_the_gpus_of_each_call() -> None:
    kinds = {"a40": "a40-vllm", "h100": "h100-vllm"}

    def pages(cluster: str) -> int:
        settings = {"cluster": cluster, "calibration": kinds, "training": {"micro_batch_tokens": "32K"}}
        loaded = loaded_of(EXPERIMENT | settings, {"workflow.prompts": 64})
        (spec,) = parse_systems(loaded.experiment.systems)
        return Simulator(loaded).placed(spec.make()).rollout_costs.capacity_pages(4)

    assert pages("1x8xa40+1x8xh100") < pages("2x8xh100") / 1.5
    with pytest.raises(CapacityError, match=r"call train .* does not fit on GPU 8: .* GB of a40"):
        pages("1x8xh100+1x8xa40")


# Round trip ----------------------------------------------------------------------------------------------------------


def test_results_say_what_they_ran_on(tmp_path: Path, call: Command) -> None:
    result = run(systems=[SPLIT, "one_step_off"])
    result.write(tmp_path / "out")
    again = read_result(tmp_path / "out")
    (setup,) = setups_of(again.manifest)
    assert (setup.cluster, setup.gpus) == (MIXED, 24)
    assert [record["name"] for record in setup.calibrations] == ["h20-vllm", "h100-sxm-vllm"]
    assert load_any_cluster(again.manifest["cluster"]) == load_any_cluster(MIXED)
    assert "bubble and tail count a second of h20 and h100-sxm alike" in " ".join(again.notes)
    recorded = {key: value for key, value in again.manifest["experiment"].items() if value is not None}
    assert_same(rlsim.run(recorded), result)

    YAML().dump(EXPERIMENT, tmp_path / "kinds.yaml")
    checked = call("check", tmp_path / "kinds.yaml")
    assert checked.code == 0
    assert "1 system × 1 seed × 1 case" in checked.out
    assert call("report", tmp_path / "out").code == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "h20-vllm, h100-sxm-vllm" in page
    assert "Calibration h20-vllm" in page
