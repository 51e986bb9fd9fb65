"""Expert parallelism in training: memory, FLOPs, all-to-alls and reductions worked out by hand; every attention."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, Talk, cases
from test_init import draft_of
from test_train import FLOPS_ONLY, IDEAL, MEMORY_ONLY

from evidence.validate.parts import Options
from evidence.validate.steps import trainer_rows
from evidence.validate.steps_nemo import nemo_rows
from rlsim import run
from rlsim.cost.collectives import Groups
from rlsim.cost.flops import DELTA_CHUNK_TOKENS, Reach, attention_work, forward_flops
from rlsim.cost.layout import Layout
from rlsim.cost.memory import activation_bytes_per_token, call_bytes, stage_parts
from rlsim.cost.reallocation import Reallocation, common_bytes
from rlsim.cost.strategy import TrainStrategy
from rlsim.cost.train import TrainCost
from rlsim.cost.transfer import gather_s
from rlsim.errors import CapacityError, ConfigError
from rlsim.experiment.run import check_experiment
from rlsim.frameworks.mapping import Reading, default_values, names
from rlsim.frameworks.settings import Settings
from rlsim.models.hardware import Cluster, load_cluster
from rlsim.models.layers import FullAttention, LinearAttention
from rlsim.models.model import Model, load_model
from rlsim.policies.plan import ExplicitPlan
from rlsim.workflow.graph import Call, Workflow
from rlsim.workflow.plan import Placement, Plan

QWEN = load_model("qwen3-30b-a3b")
DEEPSEEK = load_model("deepseek-v3")
NODES = load_cluster("4x8xh100")
LAYERS, HIDDEN, WIDTH, EXPERTS, ACTIVE = 48, 2048, 768, 128, 8
ROUTED = 3 * EXPERTS * WIDTH * HIDDEN  # weights of a layer's experts
LAYER = ROUTED + 2 * HIDDEN * 32 * 128 + 2 * HIDDEN * 4 * 128 + EXPERTS * HIDDEN + 2 * HIDDEN + 2 * 128
KEPT = EXPERTS * HIDDEN + 2 * HIDDEN + 2 * 128  # of a layer on every GPU of a TP group: router and norms
KV = 2 * HIDDEN * 4 * 128  # cut over no more GPUs than there are KV heads
ENDS = 2 * 151_936 * HIDDEN + HIDDEN
SENT = 2 * ACTIVE * HIDDEN  # bytes of a token's copies


def outside(tp: int) -> float:
    """Weights of a layer on one GPU but for its experts."""
    return (LAYER - ROUTED - KEPT - KV) / tp + KEPT + KV / min(tp, 4)


def cost(strategy: TrainStrategy, collectives: Any = None, cluster: Cluster = NODES, model: Model = QWEN) -> TrainCost:
    return TrainCost(model, cluster, collectives or Talk(), strategy, IDEAL)


# Degrees ----------------------------------------------------------------------------------------------------------


@cases("cost", "experts are cut over neighbours of a stage")
def test_experts_are_cut_over_neighbours_of_a_stage(given: dict[str, int], cut: int, copies: int) -> None:
    strategy = TrainStrategy(**given)  # type: ignore[arg-type]
    assert strategy.gpus == 32
    assert (strategy.expert_cut, strategy.experts.shards) == (cut, copies)
    assert strategy.experts.gpus == 32
    layout = Layout.of(0, strategy)
    assert layout.experts.gpus == layout.gpus
    assert (layout.experts.tp, layout.experts.dp) == (strategy.experts.tp, strategy.experts.dp)
    rest, *experts = (n for n, _ in stage_parts(QWEN, strategy))
    layers = LAYERS / strategy.pp * (outside(strategy.tp) + ROUTED / cut)
    assert sum([rest, *experts]) == pytest.approx(layers + ENDS // strategy.pp / strategy.tp, rel=1e-4)


@cases("cost", "errors name the degrees and what they do not divide")
def test_errors_name_the_degrees_and_what_they_do_not_divide(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainStrategy(**given).check_model(QWEN)


def experiment(**training: Any) -> dict[str, Any]:
    told = {"cluster": "4x8xh100", "model": "qwen3-30b-a3b", "workflow": {"prompts": 8, "responses": 8, "steps": 1}}
    trace = {"fixed": 512, "cap": 512, "default_prompt_tokens": 96}
    training = {"offload": True, "backend": "megatron", **training}
    return {**TINY, **told, "trace": trace, "training": training, "systems": [{"verl": {"tp": 4}}]}


def test_a_plan_says_it_too_and_is_written_back() -> None:
    call = {"gpus": "0-31", "tp": 2, "ep": 8, "expert_tp": 2}
    calls = dict.fromkeys(("train", "old_log_prob", "ref_log_prob"), call) | {"generate": {"gpus": "all", "tp": 4}}
    plan = experiment() | {"systems": [{"name": "own", "use": [{"plan": {"calls": calls}}]}]}
    assert check_experiment(plan).runs == 1
    with pytest.raises(ConfigError, match=r"training\.ep 8: qwen2.5-7b has no experts to share out"):
        check_experiment({**experiment(ep=8), "model": "qwen2.5-7b"})
    placed = Plan({"train": Placement(tuple(range(32)), TrainStrategy(dp=16, tp=2, ep=8, expert_tp=2))})
    graph = Workflow("training", (Call("train", "train", "actor"),), ())
    written = ExplicitPlan.of(placed, graph).calls["train"]
    assert (written.tp, written.ep, written.expert_tp, written.dp) == (2, 8, 2, 16)
    with pytest.raises(CapacityError, match=r"it fits with .*training\.ep=4"):
        run(experiment(recompute="none", micro_batch_tokens=4096, zero_stage=1))


def test_lent_gpus_would_hold_some_experts_only() -> None:
    parts = [{"verl": {"tp": 4}}, {"split": {"rollout_gpus": 16}}, "elastic_split"]
    wanted = experiment(tp=2, ep=8, zero_stage=1) | {"systems": [{"name": "own", "use": parts}]}
    with pytest.raises(ConfigError, match=r"training\.ep 8 spreads experts over data-parallel replicas"):
        check_experiment(wanted)


# Without expert parallelism ---------------------------------------------------------------------------------------


# Memory -----------------------------------------------------------------------------------------------------------


def test_states_by_hand() -> None:
    """Experts once over EP's eight GPUs, their optimizer states over the four GPUs that hold the same ones."""
    memory = call_bytes(QWEN, TrainStrategy(dp=16, tp=2, ep=8, zero_stage=1), backward=True)
    rest, experts = LAYERS * outside(2) + ENDS / 2, LAYERS * ROUTED / 8
    assert memory["parameters"] == 2 * rest + 2 * experts
    assert memory["gradients"] == 4 * rest + 4 * experts
    assert memory["optimizer states"] == pytest.approx(12 * rest / 16 + 12 * experts / 4)
    one_copy = call_bytes(QWEN, TrainStrategy(dp=8, ep=8, zero_stage=1), backward=True)
    assert one_copy["optimizer states"] == pytest.approx(12 * (LAYERS * (LAYER - ROUTED) + ENDS) / 8 + 12 * experts)
    sharded = call_bytes(QWEN, TrainStrategy(dp=32, ep=8, zero_stage=3), backward=True)
    assert sharded["parameters"] == pytest.approx(4 * QWEN.parameters / 32)
    assert sharded["gathered layers"] == 8 * 151_936 * HIDDEN  # more than a layer with its 16 experts
    assert call_bytes(QWEN, TrainStrategy(dp=16, tp=2, ep=8), backward=False)["parameters"] == memory["parameters"]


def test_a_token_is_kept_for_each_of_its_experts() -> None:
    tp, ep = TrainStrategy(dp=4, tp=2, recompute="none"), TrainStrategy(dp=4, tp=2, ep=8, recompute="none")
    rest = 2 * (4 * HIDDEN + (2 * 32 * 128 + 2 * 4 * 128 + 3 * ACTIVE * WIDTH) / 2)
    assert activation_bytes_per_token(QWEN.layer, ep)[0] == rest + SENT / 2
    assert activation_bytes_per_token(QWEN.layer, tp)[0] == rest + SENT  # an expert that is cut gets its tokens whole


@pytest.mark.parametrize(("looped", "held"), [(False, 12), (True, 6 + 6 * WIDTH / HIDDEN)])
def test_gradients_of_weighting_grouped_experts(looped: bool, held: float) -> None:
    """Under FSDP, of each number that experts put out: its product's gradient, its own and the router's, all in fp32;
    where experts run one by one those of their inputs and outputs, gate, up and product."""
    *_, gradients = activation_bytes_per_token(QWEN.layer, TrainStrategy(zero_stage=3, looped_experts=looped))
    assert gradients == 2 * HIDDEN + held * ACTIVE * HIDDEN


# Work -------------------------------------------------------------------------------------------------------------


def test_active_parameters_decide_the_flops() -> None:
    """Six FLOPs a token and active weight for a pass with gradients, whatever EP; on a GPU its share of them."""
    active = QWEN.active_parameters - 151_936 * HIDDEN - LAYERS * (2 * HIDDEN + 2 * 128) - HIDDEN
    tokens = 4096.0
    pairs = 4 * LAYERS * 32 * 128 * tokens * (tokens + 1) / 2
    assert forward_flops(QWEN, [tokens]) == pytest.approx(2 * active * tokens + pairs)
    lengths = np.full(32, tokens)
    for strategy in (
        TrainStrategy(dp=32, ep=8, recompute="none"),
        TrainStrategy(dp=16, tp=2, ep=32, recompute="none"),
        TrainStrategy(dp=8, tp=2, cp=2, ep=4, recompute="none", expert_tp=2),
    ):
        time = cost(strategy, cluster=FLOPS_ONLY.model_copy(update={"nodes": 4})).train_s(lengths)
        assert time.compute_s == pytest.approx((6 * active * tokens + 3.5 * pairs) * 32 / 32 / 1e12, rel=1e-6)
        assert time.communication_s == 0


def test_the_busiest_experts_hold_all_up() -> None:
    lengths = np.full(32, 1024.0)
    even, uneven = (
        cost(TrainStrategy(dp=32, ep=8, recompute="none", expert_imbalance=x), Talk(all_to_all=1.0), FLOPS_ONLY_4)
        for x in (1.0, 1.5)
    )
    experts = 6 * LAYERS * 3 * ACTIVE * WIDTH * HIDDEN * 1024 / 1e12
    assert uneven.train_s(lengths).compute_s - even.train_s(lengths).compute_s == pytest.approx(experts / 2)


def test_experts_one_by_one_take_the_host_by_hand() -> None:
    """1 ms an expert, 128 a layer (those of its EP rank): forward, twice that backward, and once more recomputed."""
    efficiency = replace(IDEAL, expert_launch_s=1.0, looped_expert_s=1e-3)
    for ep, experts in ((1, 128), (8, 16)):
        strategy = TrainStrategy(dp=32, ep=ep, looped_experts=True, micro_batch_sequences=1)
        call = TrainCost(QWEN, FLOPS_ONLY_4, Talk(), strategy, efficiency)
        launched_s = LAYERS * experts * 1e-3
        assert call.forward_s(np.full(32, 8.0)).compute_s == pytest.approx(launched_s, rel=1e-2)
        assert call.train_s(np.full(64, 8.0)).compute_s == pytest.approx(2 * 4 * launched_s, rel=1e-2)


FLOPS_ONLY_4 = FLOPS_ONLY.model_copy(update={"nodes": 4})


def test_element_wise_bytes_of_the_dispatcher() -> None:
    """Copies made (1 + 8 hidden widths), sorted (16), sorted back (16), added up (9)."""
    memory = MEMORY_ONLY.model_copy(update={"nodes": 4})
    lengths = np.full(32, 4096.0)
    one, eight = (
        cost(TrainStrategy(dp=32, ep=ep, recompute="none"), cluster=memory).forward_s(lengths) for ep in (1, 8)
    )
    weights = 2 * LAYERS * ROUTED * (1 - 1 / 8)  # read by a GPU that holds them all
    assert one.compute_s - eight.compute_s == pytest.approx(weights / 1e12)
    layer = cost(TrainStrategy(dp=32, ep=8))._elementwise_bytes(QWEN.layer)
    around = 10 * HIDDEN + attention_work(QWEN.layer.attention).moved + 3 * ACTIVE * WIDTH
    assert layer == 2 * (around + HIDDEN * (1 + 8 + 16 + 16 + 9))


# Communication ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_all_to_alls_by_hand(recompute: Any, passes: int) -> None:
    """Dispatch and combine in each layer, forward and backward, and once more where the forward pass is repeated."""
    spy = Talk(all_to_all=1e-3)
    strategy = TrainStrategy(dp=32, ep=16, recompute=recompute, micro_batch_sequences=1)
    time = cost(strategy, spy).train_s(np.full(32, 4096.0))
    assert time.communication_s == pytest.approx(LAYERS * 2 * passes * 1e-3)
    assert {asked for asked in spy.asked if asked[0] == "all_to_all"} == {("all_to_all", 4096.0 * SENT, 16, 2)}
    assert cost(strategy, spy).forward_s(np.full(32, 4096.0)).communication_s == pytest.approx(LAYERS * 2 * 1e-3)


def test_tp_and_cp_ranks_send_their_own_tokens() -> None:
    spy = Talk(all_to_all=1e-3, all_gather=1e-3, reduce_scatter=1e-3)
    strategy = TrainStrategy(dp=8, tp=4, ep=8, recompute="none", sequence_parallel=True, micro_batch_sequences=1)
    time = cost(strategy, spy).forward_s(np.full(8, 4096.0))
    asked = {(op, size, gpus, nodes) for op, size, gpus, nodes in spy.asked if gpus > 1}
    assert ("all_to_all", 1024.0 * SENT, 8, 1) in asked
    # Attention alone is under TP: its input gathered, its output scattered; experts are whole.
    assert time.communication_s == pytest.approx(LAYERS * (2 + 2) * 1e-3)
    spy = Talk(all_gather=1.0, reduce_scatter=1.0, all_to_all=1.0)
    cut = TrainStrategy(dp=8, tp=4, ep=4, expert_tp=2, recompute="none", sequence_parallel=True)
    cost(cut, spy).forward_s(np.full(8, 4096.0))
    assert {(op, gpus) for op, size, gpus, _ in spy.asked if size == 2 * 1024.0 * SENT} == {
        ("all_gather", 2),
        ("reduce_scatter", 2),
    }


def test_gradients_are_reduced_where_they_are_the_same() -> None:
    """Of experts over the four GPUs that hold the same ones, eight apart; of all else over DP × CP."""
    spy = Talk()
    cost(TrainStrategy(dp=16, tp=2, ep=8, zero_stage=1), spy).update_time()
    rest, experts = LAYERS * outside(2) + ENDS / 2, LAYERS * ROUTED / 8
    assert spy.asked == {
        ("reduce_scatter", 4 * rest, 16, 4),
        ("all_gather", 2 * rest, 16, 4),
        ("reduce_scatter", 4 * experts, 4, 4),
        ("all_gather", 2 * experts, 4, 4),
    }
    alone = Talk()
    cost(TrainStrategy(dp=16, tp=2, ep=32), alone).update_time()
    assert alone.asked == {("all_reduce", 4 * rest, 16, 4)}
    layout = Layout.of(0, TrainStrategy(dp=16, tp=2, ep=8))
    assert Groups(Talk(), NODES, layout.experts).spreads("shards") == [(4, 1, 1)]


# New weights ------------------------------------------------------------------------------------------------------


def test_export_gathers_experts_over_the_gpus_that_hold_them_once() -> None:
    spy = Talk()
    gather_s(QWEN, spy, NODES, Layout.of(0, TrainStrategy(dp=8, tp=2, pp=2, ep=8)))
    assert {asked for asked in spy.asked if asked[1] in (2.0 * ROUTED, 2.0 * ROUTED / 8)} == {
        ("broadcast", 2.0 * ROUTED / 8, 2, 2),
        ("all_gather", 2.0 * ROUTED, 8, 1),
    }
    assert ("all_gather", 2.0 * (LAYER - ROUTED), 2, 1) in spy.asked


def test_reallocation_moves_experts_from_where_they_lie() -> None:
    one = load_cluster("8xh100")
    moved = Reallocation(QWEN, one, Talk(lambda op, size, gpus, nodes: size if gpus > 1 else 0.0))
    apart, same = (Layout.of(0, TrainStrategy(dp=4, ep=4)), Layout.of(4, TrainStrategy(dp=4, ep=4)))
    assert moved.time_s(apart, apart) == 0
    routed = float(common_bytes(QWEN, 1, 1, experts=True)[0, 0])
    rest = float(common_bytes(QWEN, 1, 1, experts=False)[0, 0])
    assert (routed, rest) == (2.0 * LAYERS * ROUTED, 2.0 * (QWEN.parameters - LAYERS * ROUTED))
    assert moved.time_s(apart, same) == pytest.approx(rest + routed / 4)  # all of the rest, a quarter of the experts
    whole = Layout(first_gpu=4, dp=4)
    assert moved.time_s(apart, whole) == pytest.approx(rest + routed)


# Attention of every kind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [1, 3, 4, 7, 100])
def test_pairs_within_a_window_are_counted_in_closed_form(window: int, chunked: bool) -> None:
    def seen(query: int, key: int) -> bool:
        return key <= query and (query // window == key // window if chunked else query - key < window)

    for tokens in range(13):
        pairs = sum(seen(query, key) for query in range(tokens) for key in range(tokens))
        assert Reach(window, chunked).pairs(np.array([float(tokens)]))[0] == pairs
    assert Reach().pairs(np.array([13.0]))[0] == 91


def test_latent_attention_is_not_absorbed_in_training() -> None:
    work = attention_work(DEEPSEEK.layers[0].attention)
    assert work.pair_flops == 2 * 128 * (128 + 64) + 2 * 128 * 128
    assert work.kept == 128 * 2 * 192 + 128 * 2 * 128  # queries and keys, values and output
    # 37 billion active parameters, as published, without embedding (0.9) and with the head
    assert forward_flops(DEEPSEEK, [1]) == pytest.approx(2 * 36.6e9, rel=0.01)


def test_each_kind_of_layer_has_its_own_attention() -> None:
    hybrid = load_model("qwen3-next-80b-a3b")
    kinds = {type(layer.attention) for layer in hybrid.groups}
    assert kinds == {LinearAttention, FullAttention}
    linear = next(layer.attention for layer in hybrid.groups if isinstance(layer.attention, LinearAttention))
    work = attention_work(linear)
    inside = DELTA_CHUNK_TOKENS * (6 * 128 + 4 * 128)
    assert (work.pair_flops, work.token_flops) == (0.0, 32 * (6 * 128 * 128 + inside))
    long, short = (forward_flops(hybrid, [tokens]) / tokens for tokens in (65_536, 64))
    assert long - short == pytest.approx(12 * 4 * 16 * 256 * (65_536 - 64) / 2)  # of the 12 full layers alone
    gemma = load_model("gemma-3-27b")
    more = forward_flops(gemma, [8192]) - forward_flops(gemma, [8191])
    full, windows = 10, 52
    matrices = forward_flops(gemma, [1]) - 62 * 4 * 32 * 128
    assert more == pytest.approx(matrices + 4 * 32 * 128 * (full * 8192 + windows * 1024))


# Stages and recipes -----------------------------------------------------------------------------------------------


def test_nemo_recipes_say_how_experts_are_spread() -> None:
    def entries(tp: int, ep: int, expert_tp: int, *, has_experts: bool = True) -> dict[str, Any]:
        degrees = {"enabled": True, "tensor_model_parallel_size": tp, "expert_model_parallel_size": ep,
                   "expert_tensor_parallel_size": expert_tp}  # fmt: skip
        config = Settings(default=dict(default_values("nemo", "0.7")), names=names("nemo"))
        config.put(degrees, "recipe.yaml", "policy.megatron_cfg.")
        sizes = ("train_micro_batch_size", "logprob_batch_size", "train_global_batch_size")
        config.put(dict.fromkeys(sizes, 1), "recipe.yaml", "policy.")
        found = Reading("nemo", config, has_experts=has_experts).entries("training")
        return {key: entry.value for key, entry in found.items() if key in ("ep", "expert_tp")}

    assert entries(2, 8, 1) == {"ep": 8}
    assert entries(2, 8, 2) == {"ep": 8, "expert_tp": 2}
    assert entries(2, 1, 1) == {"expert_tp": 1}
    assert entries(4, 1, 1, has_experts=False) == {}


def test_verl_cuts_experts_by_tp_unless_told_otherwise(tmp_path: Path) -> None:
    """Megatron-LM's own default: an expert is cut by TP."""
    keys = [f"actor_rollout_ref.actor.megatron.{kind}_parallel_size" for kind in ("tensor_model", "expert_model")]
    cut = "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1"
    given = ["actor_rollout_ref.actor.strategy=megatron", f"{keys[0]}=2", f"{keys[1]}=4"]
    found = [draft_of(tmp_path, *given, *more, model="qwen3-30b-a3b").data()["training"] for more in ([], [cut])]
    assert [(one["tp"], one["ep"], one["expert_tp"]) for one in found] == [(2, 4, 2), (2, 4, 1)]


def test_verl_says_whether_rotary_embeddings_are_fused(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion"
    given = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.optimizer_offload=True"]
    for more, fused in (([], False), ([f"+{key}=True"], None), ([f"+{key}=False"], False)):
        training = draft_of(tmp_path, *given, *more, model="qwen3-30b-a3b").data()["training"]
        assert (training.get("fused_rope"), training["host_memory"]) == (fused, "pinned")


def test_published_iterations_of_megatron_core_are_near() -> None:
    """Nothing is fitted to them; micro-batches of one sequence are too fast for want of launch times."""
    errors = {row.case: row.error for row in trainer_rows() if row.case.startswith("megatron")}
    assert np.mean(np.abs(list(errors.values()))) < 0.15
    assert all(abs(error) < 0.085 for case, error in errors.items() if case.endswith("-full"))


def test_trainers_with_fsdp_are_as_far_off_as_the_page_says() -> None:
    """Reading a position is fitted to 0.6B; FlashAttention-2's share of the peak is that of its successor's paper.

    At 65,536 tokens FlashAttention-3 reaches more of the peak than it is taken to.
    """
    rows = [row for row in trainer_rows() if row.case.startswith(("prime-rl", "prime-sft"))]
    peaks = [row.error for row in rows if row.quantity == "peak_gib"]
    assert len(peaks) == 17
    assert all(-0.07 < error < 0.02 for error in peaks)
    seconds = {row.case: row.error for row in rows if row.quantity == "iteration_s"}
    slow = [error for case, error in seconds.items() if "flash_attention_2" in case]
    long = [error for case, error in seconds.items() if "4b-2507/8-of-8xh" in case and "65536" in case]
    assert (len(slow), len(long)) == (5, 2)
    assert all(-0.16 < error < 0.04 for error in slow), "down to -67% with the attention of Hopper"
    assert all(0.06 < error < 0.12 for error in long), "within 5% without the reading of positions"
    short = [error for case, error in seconds.items() if "4b-2507/8-of-8xh" in case and "16384" in case]
    assert len(short) == 4
    assert all(0 < error < 0.08 for error in short), "the trainer compiles what is moved beside products away"


def test_lora_on_hopper_is_slower_than_full_training_as_measured() -> None:
    """4B at 16,384 tokens, by formula: 1.13 to 1.15 times as long measured."""
    found = {row.case: row for row in trainer_rows() if row.quantity == "iteration_s"}
    errors = {case: row.error for case, row in found.items() if case.startswith("prime-lora") and "b200" not in case}
    assert len(errors) == 13
    assert -0.195 < min(errors.values()) < max(errors.values()) < 0.1
    for gpu, least in (("h100", 1.03), ("h200", 0.99)):
        full, lora = (found[f"{group}/qwen3-4b-2507/8-of-8x{gpu}-flash_attention_3/1x16384-full"]
                      for group in ("prime-rl", "prime-lora"))  # fmt: skip
        assert lora.reference / full.reference > lora.simulated / full.simulated > least


def test_measured_rows_of_mixtures_fit_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rlsim validate steps` runs them."""

    def checked(experiment: dict[str, Any], mean_tokens: float) -> dict[str, float]:
        check_experiment({**experiment, "trace": {**experiment["trace"], "fixed": round(mean_tokens)}})
        return dict.fromkeys(("step", "generate", "old_log_prob", "ref_log_prob", "train", "weight_sync"), 1.0)

    monkeypatch.setattr("evidence.validate.steps_nemo.seconds", checked)
    rows, refused, _ = nemo_rows(Options())
    cases = {row.case for row in rows if row.quantity == "step_time_s"}
    assert {"nemo-rl-moe/qwen3-30b-a3b/on-policy", "nemo-rl-moe/qwen3-30b-a3b/one-step-off"} <= cases
    assert len(cases) + len(refused) == 10
