"""KV offloading in experiments: what host memory holds, what loading takes, and what it is worth where KV is short."""

from __future__ import annotations

from typing import Any

import pytest

import rlsim
from rlsim.cost.calibration import load_calibration
from rlsim.cost.rollout import RolloutCostModel
from rlsim.cost.transfer import NO_HOST_KV
from rlsim.errors import ConfigError
from rlsim.hardware import load_cluster
from rlsim.models import load_model

CLUSTER = load_cluster("8xh100")
#: Responses of 4,096 tokens to prompts of 512, 64 at a time on each GPU, which has KV cache for half of them.
SHORT_OF_KV: dict[str, Any] = {
    "name": "short-of-kv",
    "cluster": "8xh100",
    "model": "llama-3.1-8b",
    "calibration": "h100-vllm",
    "trace": {"fixed": 4096, "cap": "4K", "default_prompt_tokens": 512},
    "workflow": {"algorithm": "grpo", "prompts": 128, "responses": 4, "steps": 1, "reference": False},
    "training": {"offload": True},
    "memory_utilization": 0.5,
    "seeds": 1,
    "systems": [{"verl": {"tp": 1}}],
}


def test_host_memory_by_hand() -> None:
    """A page of 16 tokens takes 2 MiB at TP 1; copies of the GPU's own pages are among those there is room for."""
    model, calibration = load_model("llama-3.1-8b"), load_calibration("h100-vllm")
    costs = RolloutCostModel(model, CLUSTER, calibration, kv_offloading_bytes=200 * 2**30)
    for tp in (1, 4):
        host = costs.host_kv(tp)
        assert host.pages == 200 * 512 * tp - costs.capacity_pages(tp) > 0
        assert host.load_s(3) == pytest.approx(CLUSTER.host.latency_s + 3 * 2**21 / tp / CLUSTER.host.bytes_per_s)
        assert host.load_s(0) == 0.0
    assert RolloutCostModel(model, CLUSTER, calibration).host_kv(1) == NO_HOST_KV
    assert RolloutCostModel(model, CLUSTER, calibration, kv_offloading_bytes=2**30).host_kv(1).pages == 0


def test_preempted_responses_are_loaded_instead_of_prefilled() -> None:
    plain = rlsim.run(SHORT_OF_KV).steps.iloc[0]
    offloaded = rlsim.run(SHORT_OF_KV, overrides={"engine.kv_offloading_bytes": "128 GiB"}).steps.iloc[0]
    too_small = rlsim.run(SHORT_OF_KV, overrides={"engine.kv_offloading_bytes": "1 GiB"}).steps.iloc[0]
    assert plain.preemptions > 0
    assert plain.kv_loaded_tokens == too_small.kv_loaded_tokens == 0
    assert too_small.gen_time_s == plain.gen_time_s
    assert 0 < offloaded.kv_loaded_tokens < offloaded.prefix_hit_tokens
    assert offloaded.prefix_hit_tokens > plain.prefix_hit_tokens
    assert offloaded.gen_bound_s < offloaded.gen_time_s < plain.gen_time_s


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"engine.enable_prefix_caching": False}, "prefix cache, which this engine is without; leave it out"),
        ({"engine.data_parallel_attention": 8}, "which engine.data_parallel_attention is without; leave it out"),
        ({"model": "gemma-3-12b"}, "where every layer keeps all tokens, unlike gemma-3-12b"),
    ],
)
def test_host_memory_without_a_prefix_cache_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rlsim.run(SHORT_OF_KV, overrides={"engine.kv_offloading_bytes": "64 GiB", **overrides})
