"""What an experiment's calls cost: the right responses, at the price of their kind."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from conftest import placed_of

from rlsim.cost.calibration import load_calibration
from rlsim.cost.calls import CallCosts
from rlsim.cost.collectives import Collectives
from rlsim.cost.layout import Layout
from rlsim.cost.memory import rollout_weight_bytes
from rlsim.cost.strategy import TRAFFIC, TrainEfficiency, TrainStrategy, unfused_of
from rlsim.cost.train import TrainCost
from rlsim.cost.transfer import gather_s, host_copy_s
from rlsim.experiment.placed import PlacedExperiment, layout_of
from rlsim.experiment.times import ExperimentTimes
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model
from rlsim.policies.plan import ExplicitPlan
from rlsim.sim.request import Request

LENGTHS = [(100, 900), (200, 1100), (300, 50), (400, 2000)]  # of prompts and responses


@cache
def placed(weight_sync: str = "reshard") -> PlacedExperiment:
    return placed_of(
        {
            "name": "x",
            "cluster": "8xh100",
            "model": "qwen2.5-1.5b",
            "calibration": "h100-sglang",
            "trace": {"fixed": 64, "cap": 64},
            "workflow": {"prompts": 4, "responses": 1, "steps": 1},
            "training": {"tp": 2, "backend": "megatron", "mini_batches": 2, "epochs": 3, "offload": True},
            "weight_sync": weight_sync,
            "systems": ["verl"],
        }
    )


def samples() -> list[Request]:
    """Of which all tokens are generated."""
    made = [Request(i, i, prompt, tokens) for i, (prompt, tokens) in enumerate(LENGTHS)]
    for request in made:
        request.generated, request.finished_at = request.response_tokens, 1.0
    return made


def collectives() -> Collectives:
    cluster, calibration = placed().loaded.kind((0,))
    return Collectives(calibration.collectives, calibration.reference, cluster)


def by_itself(call: str) -> TrainCost:
    """The cost of a call, made without the experiment."""
    own = placed()
    strategy = own.plan.of(call).strategy
    cluster, calibration = own.loaded.kind((0,))
    model, flop = own.loaded.models["actor"], calibration.training.flop_efficiency["megatron"]
    unfused = unfused_of(model, "megatron", calibration.reference.flops_per_byte)
    efficiency = TrainEfficiency(flop=flop, unfused=unfused)
    return TrainCost(model, cluster, collectives(), strategy, efficiency)


def seconds(name: str, rollout_tp: int = 4, own: PlacedExperiment | None = None) -> float:
    own = own or placed()
    call = own.workflow.call(name)
    return sum(s for _, s in ExperimentTimes(own).parts(call, own.plan.of(name), samples(), rollout_tp))


def test_training_is_on_prompts_and_responses_of_the_batch() -> None:
    whole = [prompt + tokens for prompt, tokens in LENGTHS]
    assert seconds("train") == pytest.approx(by_itself("train").train_s(whole, 2, 3).total_s)


def test_log_probs_are_of_prompts_and_responses_without_gradient() -> None:
    whole = [prompt + tokens for prompt, tokens in LENGTHS]
    assert seconds("old_log_prob") == pytest.approx(by_itself("old_log_prob").forward_s(whole).total_s)


def test_a_weight_sync_goes_to_the_rollouts_layout() -> None:
    alone = by_itself("train")
    for tp in (2, 4):
        copied_s = 2 * rollout_weight_bytes(alone.model, tp) / alone.cluster.gpu.memory_bytes_per_s
        source = Layout.of(0, alone.strategy)
        gathered_s = gather_s(alone.model, collectives(), alone.cluster, source, over_tp=tp != 2)
        onloaded_s = host_copy_s(alone.model.weight_bytes / alone.strategy.tp, alone.cluster.host)
        assert seconds("weight_sync", tp) == pytest.approx(onloaded_s + gathered_s + copied_s)
    assert seconds("weight_sync", 2) != seconds("weight_sync", 4)


HALVES = {"train": "4-7", "old_log_prob": "4-7"}


@pytest.mark.parametrize(
    ("generate", "others", "awake_s"),
    [
        (None, {}, 0.5525),
        ({"tp": 4}, {}, 0.5525),
        ({"tp": 4, "memory_share": 0.45}, {}, 0.5525 / 2),
        ({}, {}, 0.5525),
        ({"tp": 4, "gpus": "0-3"}, HALVES | {"ref_log_prob": "4-7"}, 0.0),
        ({"tp": 4, "gpus": "0-3"}, HALVES | {"ref_log_prob": "0-3"}, 0.5525),
    ],
)
def test_an_engine_falls_asleep_and_wakes_once_a_sync_on_gpus_that_others_have(
    generate: dict[str, Any] | None, others: dict[str, str], awake_s: float
) -> None:
    """90% of 85.03 GB is given up and mapped again, at the 277 GB/s of 70.41 GiB in 0.273 s, however it is spelled."""
    own = placed("bucketed")
    if generate is not None:
        calls = {name: {"gpus": others.get(name, "all")} for name in ("train", "old_log_prob", "ref_log_prob")}
        own = replace(own, placing=ExplicitPlan.model_validate({"calls": {"generate": generate, **calls}}))
    source, target = own.plan.of("train"), own.plan.of("generate")
    sync_s = own.moving("actor", source, "generate", target)(layout_of(source), layout_of(target, 4))
    assert seconds("weight_sync", own=own) - sync_s == pytest.approx(awake_s, abs=1e-4)


def test_pieces_add_up_to_the_call() -> None:
    train = placed().workflow.call("train")
    pieces, alone = ExperimentTimes(placed()).pieces(train), by_itself("train")
    assert sum(s for _, s in pieces.piece([1000, 1300])) == pytest.approx(
        alone.part_time([1000, 1300], backward=True).total_s
    )
    assert pieces.tokens == alone.strategy.micro_batch_tokens
    update, load_s = alone.update_time(), alone.copied_s(backward=True, out=False)
    assert pieces.load_s == pytest.approx(load_s)
    assert dict(pieces.finish) == pytest.approx(
        {"communication": update.communication_s, "optimizer": update.optimizer_s, "offload": load_s}
    )
    logprob = ExperimentTimes(placed()).pieces(placed().workflow.call("old_log_prob"))
    forward = by_itself("old_log_prob")
    assert sum(s for _, s in logprob.piece([1000])) == pytest.approx(forward.part_time([1000], backward=False).total_s)
    assert [name for name, _ in logprob.finish] == ["offload"]


def test_narrow_models_move_more_for_their_flops() -> None:
    """Qwen3-0.6B by hand: a layer's weights, and what its norms, additions, rotary embedding and activation move."""
    h100 = load_calibration("h100-sglang")

    def share(model: str, backend: str, efficiency: float | None = None, fused_rope: bool = True) -> float:
        calls = CallCosts({"actor": load_model(model)}, load_cluster("8xh100"), h100, backend, efficiency)
        return calls.of("actor", TrainStrategy(fused_rope=fused_rope)).efficiency.layers

    moved = 2 * (3 + 2) * 1024 + 2 * (2048 + 1024) + 3 * 3072
    flops = 2 * (1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072)
    for framework, fitted in h100.training.flop_efficiency.items():
        more = (moved / flops / 2.16e-4 - 1) * TRAFFIC[framework] * h100.reference.flops_per_byte
        assert share("qwen3-0.6b", framework) == pytest.approx(1 / (1 / fitted + more), rel=2e-3)
        for wide in ("qwen2.5-7b", "llama-3.1-8b", "qwen3-32b", "llama-3.1-70b"):
            assert share(wide, framework) == pytest.approx(fitted, rel=1e-12), (
                "MPT of 70B reaches no more of an H100 than that of 7B does"
            )
    assert share("qwen3-0.6b", "megatron", fused_rope=False) == pytest.approx(share("qwen3-0.6b", "fsdp"), rel=1e-3)
    assert share("qwen3-0.6b", "fsdp", 0.3) == 0.3
