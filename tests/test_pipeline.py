"""Pipelined generation: by hand on a toy cost, and laws on a real one."""

from typing import Any

import pytest
from conftest import Talk, tables
from workloads import LinearStep

import rlsim
from rlsim.cost.calibration import HostFit, load_calibration
from rlsim.cost.curve import DecodeCurve, longer
from rlsim.cost.derived import Boundaries, HostTime, Pipelined
from rlsim.cost.memory import rollout_weight_bytes
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.roofline import RooflineStep, step_cost
from rlsim.cost.step import Chunk
from rlsim.errors import CapacityError, ConfigError
from rlsim.models.hardware import load_cluster
from rlsim.models.model import load_model

LLAMA = load_model("llama-3-7b")
H100 = load_cluster("2x8xh100")
HEAD_S = 0.5e-3


#: 8 ms for the weights of all layers, 1 us a token, 1 ns a token of context (2 ns beyond 10,000), and the head.
TOY = LinearStep(a=8e-3 + HEAD_S, b=1e-6, t=1e-9, p=1e-6, kinks=((10_000, 1e-9),), tp=2, skew=0.5)


def sends() -> Talk:
    """0.1 ms to a GPU of the node, 0.3 ms to another, whatever the size."""
    return Talk(lambda op, size, gpus, nodes: {("send_recv", 2, 1): 1e-4, ("send_recv", 2, 2): 3e-4}[op, gpus, nodes])


def toy(
    pp: int, *, host_s: float = 0.0, overlapped: bool = False, across: int = 0, layers: int = 32, head: bool = True
) -> Pipelined:
    return Pipelined(
        TOY,
        pp,
        layers=layers,
        head_s=lambda rows: HEAD_S if head else 0.0,
        boundaries=Boundaries(hidden_bytes=8192, inside=pp - 1 - across, across=across, collectives=sends()),
        host=HostTime(
            HostFit(step_s=host_s, sequence_s=0.0, prefill_s=2 * host_s, overlapped=overlapped, source="test")
        ),
    )


def test_one_stage_is_the_engine_itself() -> None:
    one = toy(1, host_s=1e-3)
    for context in (0, 5_000, 50_000):
        assert one.decode(7).step_s(context) == pytest.approx(TOY.decode(7).step_s(context) + 1e-3, rel=1e-12)
    chunks = [Chunk(100, 0), Chunk(50, 0)]
    assert one.prefill_s(chunks) == pytest.approx(TOY.prefill_s(chunks) + 3e-3, rel=1e-12)
    assert one.mixed_s(3, 900, chunks) == pytest.approx(TOY.mixed_s(3, 900, chunks) + 3e-3, rel=1e-12)


LAYERS_S = 8e-3 + 4e-6  # of a micro-batch of four


@pytest.mark.parametrize(
    ("words", "batch", "context", "expected"),
    [
        # Two micro-batches of 4 through two stages; the last one, half the layers and the head, has always work.
        ({"pp": 2}, 8, 0, 2 * (LAYERS_S / 2 + HEAD_S)),
        # Each has half of the context: 8,000 tokens are below the change of slope at 10,000, 12,000 above.
        ({"pp": 2}, 8, 16_000, 2 * ((LAYERS_S + 8e-6) / 2 + HEAD_S)),
        ({"pp": 2}, 8, 24_000, 2 * ((LAYERS_S + 14e-6) / 2 + HEAD_S)),
        # 7 sequences are cut into 4 and 3: as long as 4 and 4 of the same mean context.
        ({"pp": 2}, 7, 14_000, 2 * ((LAYERS_S + 8e-6) / 2 + HEAD_S)),
        # The head costs nothing: a round is the way through both stages, one send and the token's way back.
        ({"pp": 2, "head": False}, 8, 0, LAYERS_S + HEAD_S + 2e-4),
        ({"pp": 2, "head": False, "across": 1}, 8, 0, LAYERS_S + HEAD_S + 6e-4),
        # The host comes on top, if it does not work ahead.
        ({"pp": 2, "host_s": 1e-3}, 8, 0, LAYERS_S + HEAD_S + 2e-4 + 1e-3),
        ({"pp": 2, "host_s": 1e-3, "overlapped": True}, 8, 0, LAYERS_S + 2 * HEAD_S),
        ({"pp": 4, "host_s": 5e-3, "overlapped": True}, 64, 0, 4 * 5e-3),  # one micro-batch after another
        # One sequence in four stages: its own way only, three sends (one across nodes) and one back.
        ({"pp": 4, "across": 1}, 1, 0, 8e-3 + 1e-6 + HEAD_S + 2 * 1e-4 + 2 * 3e-4),
        ({"pp": 4, "across": 1}, 2, 0, 8e-3 + 1e-6 + HEAD_S + 2 * 1e-4 + 2 * 3e-4),
        ({"pp": 2, "layers": 5}, 8, 0, 2 * (LAYERS_S * 3 / 5 + HEAD_S)),  # ⌈5/2⌉ layers are in the fuller stage
    ],
)
def test_decoding_by_hand(words: dict[str, Any], batch: int, context: float, expected: float) -> None:
    assert toy(**words).decode(batch).step_s(context) == pytest.approx(expected, rel=1e-12)


LIGHT_S, HEAVY_S = 8e-3 + 302e-6 + 2e-6, 8e-3 + 701e-6 + 1e-6


@pytest.mark.parametrize(
    ("host_s", "batch", "context", "tokens", "expected"),
    [
        # 4 chunks over 2 stages: 400 + 100 and 300 + 200 tokens. One chunk finds the other stage idle.
        (0.0, 0, 0, (400, 300, 200, 100), 2 * ((8e-3 + 500e-6) / 2 + HEAD_S)),
        (0.0, 0, 0, (400,), 8e-3 + 400e-6 + HEAD_S + 2e-4),
        (1e-3, 0, 0, (400,), 8e-3 + 400e-6 + HEAD_S + 2e-4 + 3e-3),
        # 700 tokens in the one, 300 in the other; the lighter one takes 2 of 3 sequences, and its context.
        (0.0, 3, 3000, (700, 300), (LIGHT_S + HEAVY_S) / 2 + 2 * HEAD_S),
        (0.0, 1, 1000, (100,), (16e-3 + 101e-6 + 1e-6) / 2 + 2 * HEAD_S),  # a micro-batch each
    ],
)
def test_prefill_by_hand(host_s: float, batch: int, context: float, tokens: tuple[int, ...], expected: float) -> None:
    cost, chunks = toy(2, host_s=host_s), [Chunk(n, 0) for n in tokens]
    found = cost.mixed_s(batch, context, chunks) if batch else cost.prefill_s(chunks)
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_longer_of_two_curves_turns_where_they_cross() -> None:
    rising, flat = DecodeCurve(2, [0, 100], [1.0, 3.0]), DecodeCurve(2, [0, 50, 60], [2.0, 2.0, 2.1])
    both = longer(rising, flat)
    for context in (0, 10, 49, 50, 52, 60, 75, 100, 1000, 1e7):
        expected = max(rising.step_s(context), flat.step_s(context))
        assert both.step_s(context) == pytest.approx(expected, rel=1e-12)


# On real costs -------------------------------------------------------------------------------------------------------


def test_sampling_takes_its_time_on_the_last_stage() -> None:
    per_logit = 20e-6 / LLAMA.vocab_size  # 20 us a sequence
    plain, sampled = (step_cost(LLAMA, 2, H100, "h100-sxm-sglang", sampling_s_per_logit=x) for x in (0.0, per_logit))
    assert sampled.decode(64).step_s(9e4) - plain.decode(64).step_s(9e4) == pytest.approx(64 * 20e-6, rel=1e-9)
    chunks = [Chunk(512, 0)] * 3
    assert sampled.prefill_s(chunks) - plain.prefill_s(chunks) == pytest.approx(3 * 20e-6, rel=1e-9)
    # Where the last stage has always work, each of the micro-batches makes it wait.
    slow, slower = (
        step_cost(LLAMA, 2, H100, "h100-sxm-sglang", pp=2, dp=4, sampling_s_per_logit=n * per_logit) for n in (4, 5)
    )
    assert slower.decode(128).step_s(9e4) - slow.decode(128).step_s(9e4) == pytest.approx(128 * 20e-6, rel=1e-9)


def test_without_graphs_an_iteration_takes_at_least_its_launches() -> None:
    eager = load_calibration("h100-sxm-sglang").eager
    host = load_calibration("h100-sxm-sglang").host
    one, two, staged = (
        step_cost(LLAMA, tp, H100, "h100-sxm-sglang", pp=pp, largest_graph=0) for tp, pp in ((1, 1), (2, 1), (2, 2))
    )
    launches = LLAMA.num_hidden_layers * eager.layer_s
    assert one.decode(1).step_s(1000) == pytest.approx(launches + host.step_s + host.sequence_s, rel=1e-9)
    both = launches + LLAMA.num_hidden_layers * 2 * eager.collective_s
    assert two.decode(4).step_s(4000) == pytest.approx(both + host.step_s + 4 * host.sequence_s, rel=1e-9)
    # One sequence waits for both stages, each with half of the launches.
    assert staged.decode(1).step_s(1000) == pytest.approx(both + host.step_s + host.sequence_s, rel=0.02)
    # Batches of up to four have a graph; with two tokens of each sequence those of up to two.
    some, pairs = (step_cost(LLAMA, 1, H100, "h100-sxm-sglang", largest_graph=4, queries=k) for k in (1, 2))
    graphs = step_cost(LLAMA, 1, H100, "h100-sxm-sglang")
    assert some.decode(4).step_s(4000) == graphs.decode(4).step_s(4000) < launches
    assert some.decode(5).step_s(5000) == one.decode(5).step_s(5000) >= launches
    assert pairs.decode(2).step_s(2000) < launches <= pairs.decode(3).step_s(3000)
    # A prefill that takes longer than its launches is as with graphs.
    chunks = [Chunk(2048, 0)] * 8
    assert graphs.prefill_s(chunks) > launches
    assert one.prefill_s(chunks) == pytest.approx(graphs.prefill_s(chunks), rel=1e-9)
    # Prompts alone are launched one by one.
    decode = step_cost(LLAMA, 1, H100, "h100-sxm-sglang", prompt_graphs=False)
    assert decode.decode(5).step_s(5000) == graphs.decode(5).step_s(5000)
    assert decode.prefill_s(chunks[:1]) >= graphs.prefill_s(chunks[:1])
    assert decode.prefill_s([Chunk(16, 0)]) == pytest.approx(launches, rel=1e-9)


def test_a_norm_is_part_of_the_sum_before_it_where_the_engine_fuses_them() -> None:
    fused = load_calibration("h100-sxm-trtllm")
    for name, norms in (("llama-3.1-70b", 160), ("llama-3.1-8b", 0), ("qwen3-32b", 0)):
        model = load_model(name)
        one, apart = (RooflineStep(model, 4, H100, fused.model_copy(update={"engine": n})) for n in ("trtllm", "vllm"))
        hidden_bytes = 8 * model.hidden_size * 2
        each = one.operators.memory_bound_s(4 * hidden_bytes, 8) - 2 * hidden_bytes / fused.reference.memory_bytes_per_s
        less = {part: time_s - one.breakdown(8, 8e3)[part] for part, time_s in apart.breakdown(8, 8e3).items()}
        assert less.pop("elementwise") == pytest.approx(norms * each)
        assert not any(less.values())
        assert one.prefill_s([Chunk(8192, 0)]) == apart.prefill_s([Chunk(8192, 0)])  # by NCCL


def test_lookups_follow_the_curves() -> None:
    cost = step_cost(LLAMA, 1, H100, "h100-sxm-sglang", pp=2)
    cost.decode(8).steps_s(8 * 1000, 500)
    assert sum(cost.lookups().counts["decode_attention"].values()) == 1
    assert not cost.lookups().examples.get("decode_attention")
    cost.decode(8).steps_s(8e8, 2)
    assert "context 1e+08" in cost.lookups().examples["decode_attention"]  # of a micro-batch of 4: half of the total


def test_errors() -> None:
    with pytest.raises(ConfigError, match="PP 33"):
        step_cost(LLAMA, 1, load_cluster("16x8xh100"), "h100-sxm-sglang", pp=33)
    with pytest.raises(CapacityError, match="exceed the 16 GPUs"):
        step_cost(LLAMA, 2, H100, "h100-sxm-sglang", pp=4, dp=4)


def test_what_travels_between_stages() -> None:
    """Hidden states of all tokens over every boundary, and four bytes of each sequence's sampled token back."""

    def sent(inside: int, across: int) -> set[tuple[str, float, int, int]]:
        sizes = Talk(lambda op, size, gpus, nodes: size)
        ways = Boundaries(hidden_bytes=8192, inside=inside, across=across, collectives=sizes)
        assert ways.slowest_s(10) == 10 * 8192
        assert ways.total_s(10, 7) == (inside + across) * 10 * 8192 + 7 * 4
        return sizes.asked

    near, far = ("send_recv", 10 * 8192, 2, 1), ("send_recv", 10 * 8192, 2, 2)
    assert sent(inside=2, across=1) == {near, far, ("send_recv", 7 * 4, 2, 2)}
    assert sent(inside=1, across=0) == {near, ("send_recv", 7 * 4, 2, 1)}


# Stages of a rollout engine (engine.pp) -------------------------------------------------------------------------------

STAGED: dict[str, Any] = tables("bases")["pipeline staged"]


PLAN = {"plan": {"calls": {"generate": {"tp": 8, "pp": 2}, "train": {"tp": 8, "dp": 2}}}}


def test_stages_of_a_replica_lie_side_by_side() -> None:
    small, calibration = load_cluster("8xh100"), load_calibration("h100-vllm")
    alone = step_cost(LLAMA, 4, small, calibration, pp=2).decode(8).step_s(8_000)
    costs = RolloutCostModel(LLAMA, H100, calibration, pp=2)
    assert costs.step(8).decode(8).step_s(8_000) == alone
    over_nodes = RolloutCostModel(LLAMA, H100, calibration, pp=2, planned=True)  # of a plan: DP before PP
    assert over_nodes.step(8).decode(1).step_s(8_000) > costs.step(8).decode(1).step_s(8_000)
    with pytest.raises(ConfigError, match=r"engine.pp 2 does not divide the 1 GPUs of a replica"):
        costs.step(1)


def test_a_rollout_in_stages_runs_as_the_same_plan_does() -> None:
    found = rlsim.run({**STAGED, "systems": [{"verl": {"tp": [8, 16]}}]}).steps.set_index("system")
    assert found["initial_tp"].to_dict() == {"verl-tp16": 16, "verl-tp8": 8}
    planned = rlsim.run({**STAGED, "engine": {}, "systems": [PLAN]}).steps
    assert found.loc["verl-tp16", "gen_time_s"] == pytest.approx(float(planned["gen_time_s"].iloc[0]), rel=1e-12)


def sync_s(method: str, tp: int, pp: int) -> float:
    given = {**STAGED, "cluster": "8xh100", "weight_sync": method, "engine": {"pp": pp}}
    return float(rlsim.run({**given, "systems": [{"verl": {"tp": tp}}]}).steps["sync_time_s"].iloc[0])


def test_new_weights_reach_stages() -> None:
    assert sync_s("bucketed", 8, 2) == pytest.approx(sync_s("bucketed", 8, 1), rel=0.02)
    model, gpu = load_model("qwen2.5-32b"), load_cluster("8xh100").gpu
    kept_bytes = (rollout_weight_bytes(model, 4), rollout_weight_bytes(model, 4, 2))
    saved_s = 2 * (kept_bytes[0] - kept_bytes[1]) / gpu.memory_bytes_per_s  # a stage keeps its layers
    assert sync_s("reshard", 4, 1) - sync_s("reshard", 8, 2) == pytest.approx(saved_s, rel=1e-9)


def test_kv_of_stages_moves_by_their_layers() -> None:
    calibration, contexts = load_calibration("h100-vllm"), [8192] * 16
    seconds = {
        pp: RolloutCostModel(load_model("deepseek-v3"), H100, calibration, pp=pp).transfer_s(contexts, 8, 8, False)
        for pp in (1, 2)
    }
    assert seconds[2] == pytest.approx(seconds[1] * 31 / 61, rel=0.02)  # the latent lies on every GPU of a stage
