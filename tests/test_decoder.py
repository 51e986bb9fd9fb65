"""A real decoder on processes: tensor parallelism, changes of layout and the batch give what one process gives."""

from __future__ import annotations

import os
import signal

import pytest

torch = pytest.importorskip("torch")

from rlsim.calibrate.measure import steps  # noqa: E402
from rlsim.calibrate.measure.batch import Batch  # noqa: E402
from rlsim.calibrate.measure.bench import Bench  # noqa: E402
from rlsim.calibrate.measure.clock import Effort, Timing  # noqa: E402
from rlsim.calibrate.measure.decoder import KvCache, build_decoder, check_degree, weight_splits  # noqa: E402
from rlsim.calibrate.measure.journal import Point  # noqa: E402
from rlsim.calibrate.measure.layout import migrate, reshard  # noqa: E402
from rlsim.calibrate.measure.plan import reshard_bytes  # noqa: E402
from rlsim.calibrate.measure.steps import spread_moves  # noqa: E402
from rlsim.calibrate.measure.tasks import run_point  # noqa: E402
from rlsim.calibrate.measure.workers import Workers  # noqa: E402
from rlsim.cost.collectives import OPERATIONS  # noqa: E402
from rlsim.errors import CalibrationError  # noqa: E402
from rlsim.models import Model  # noqa: E402

TINY = Model(
    name="tiny",
    model_type="qwen3",  # with norms of queries and keys
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=40,
    dtype_bytes=4,
)
BENCH = Bench("cpu", "float32", TINY, 1, 1e6, Effort(1, 3, 0.0, 0.05))
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


@pytest.fixture(scope="module")
def two():
    with Workers(2) as workers:
        yield workers


def test_shapes_add_up_to_the_models_parameters():
    for model in (TINY, TINY.model_copy(update={"model_type": "qwen2", "tie_word_embeddings": True})):
        total = sum(torch.Size(split.shape).numel() for layer in weight_splits(model) for split in layer.values())
        assert total == model.parameters


def test_what_cannot_be_built_is_refused():
    experts = TINY.model_copy(update={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8})
    with pytest.raises(CalibrationError, match="experts"):
        weight_splits(experts)
    with pytest.raises(CalibrationError, match="norms over all heads are not built"):
        weight_splits(TINY.model_copy(update={"model_type": "olmo2"}))
    with pytest.raises(CalibrationError, match="41 tokens of the vocabulary do not divide"):
        check_degree(TINY.model_copy(update={"vocab_size": 41}), 2)


def test_every_degree_gives_the_same_logits(two):
    reference = _reference_logits(TINY, [3, 1, 4, 1, 5, 7, 8])
    alone = two.call(_logits, TINY, 1, 2)
    assert torch.allclose(alone[0], alone[1])
    assert torch.allclose(alone[0], reference, atol=1e-4)  # 5 prompt tokens, then 7 and 8 one at a time
    shared = two.call(_logits, TINY, 2, 2)
    assert torch.equal(shared[0], shared[1])
    assert torch.allclose(shared[0], reference, atol=1e-4)


@pytest.mark.parametrize(("from_tp", "to_tp"), [(1, 2), (2, 1)])
def test_a_switch_changes_no_logits(two, from_tp, to_tp):
    for before, after in two.call(_switched, TINY, from_tp, to_tp):
        assert torch.allclose(before, after, atol=1e-4)


def test_leaving_keeps_the_others_apart(two):
    for whole, parted in two.call(_parted, TINY):
        assert whole == parted


def test_points_of_the_suite(two):
    for operator, *values in (
        ("gemm", 3, 64, 32),
        ("decode_attention", 3, 20, 40, 4, 2, 8),
        ("prefill_attention", 2, 8, 5, 4, 2, 8),
        ("memory_bound", 4, 5, 1),
        ("train_block", "tiny", "forward_backward", 8, 4),
        *(("collective", op, 2, 256) for op in OPERATIONS),
        ("decode_step", "tiny", 1, "eager", 3, 40),
        ("decode_step", "tiny", 2, "eager", 3, 40),
        ("prefill_step", "tiny", 2, 10, 4),
        ("reshard", "tiny", 2, 1, 99),
        ("migrate", "tiny", 1, 2, 4096),
        ("control", "pause"),
        ("control", "group_create"),
    ):
        for found in two.call(run_point, BENCH, Point(operator, tuple(values))):
            assert isinstance(found, Timing), (operator, found)
            assert found.seconds > 0.0
            assert found.repeats >= 3
    assert reshard_bytes(TINY, 2) == TINY.weight_bytes / 2


def test_contexts_and_moves():
    assert steps.equal_contexts(3, 10) == [4, 3, 3]
    with pytest.raises(CalibrationError, match="3 sequences cannot have 2 tokens"):
        steps.equal_contexts(3, 2)
    moves = spread_moves([5, 6, 7], 2, 1)
    assert [(m.tokens, m.from_replica, m.from_slot, m.to_replica, m.to_slot) for m in moves] == [
        (5, 0, 0, 0, 0),
        (6, 1, 0, 0, 1),
        (7, 0, 1, 0, 2),
    ]


def test_workers_keep_state_and_say_what_went_wrong():
    with Workers(2) as workers:
        processes = workers.pids
        assert workers.call(_count) == [(0, 1), (1, 1)]
        assert workers.call(_count) == [(0, 2), (1, 2)]
        with pytest.raises(CalibrationError, match="measuring process 1: ValueError: one is enough"):
            workers.call(_fail)
        with pytest.raises(CalibrationError, match="not running"):
            workers.call(_count)
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_dies_is_noticed():
    with Workers(1) as workers, pytest.raises(CalibrationError, match="has died"):
        workers.call(_die)


def test_impossible_workers():
    with pytest.raises(CalibrationError, match="at least one"):
        Workers(0)
    with pytest.raises(CalibrationError, match="expected cpu or cuda"):
        Workers(1, device="tpu")


def test_sums_larger_than_the_shared_buffer(two):
    for total, shares in two.call(_large_sum):
        assert total == (3.0, 3.0, 600_001)
        assert shares == [1.0, 2.0]


# ---- on the workers --------------------------------------------------------------------------------------------------


def _flat(prompts):
    return torch.tensor([token for prompt in prompts for token in prompt])


def _built(worker, model, tp):
    cache = KvCache(model, 4, 32, "cpu", torch.float32)
    return build_decoder(worker, model, tp, cache, torch.float32)


def _logits(worker, model, tp, further):
    """Logits of the first prompt after its prefill and `further` decode steps, with the other prompts beside it."""
    with torch.inference_mode():
        decoder = _built(worker, model, tp)
        hidden = decoder.prefill(_flat(PROMPTS), [len(prompt) for prompt in PROMPTS], 0)
        contexts = torch.tensor([len(prompt) for prompt in PROMPTS])
        for token in (7, 8)[:further]:
            contexts = contexts + 1
            hidden = decoder.decode(torch.full((3,), token), contexts, int(contexts.max()))
        return _all_logits(decoder, hidden)[0]


def _all_logits(decoder, hidden):
    return torch.cat(decoder.ranks.all_gather(torch.nn.functional.linear(hidden, decoder.head)), 1)


def _reference_logits(model, tokens):
    """The last token's logits by the plainest code: whole sequence at once, no cache, heads repeated, full weights."""
    from rlsim.calibrate.measure.decoder import EPSILON, ROTARY_BASE, random_weight

    weights = [
        {
            name: random_weight(split, number * 100 + place, "cpu", torch.float32)
            for place, (name, split) in enumerate(layer.items())
        }
        for number, layer in enumerate(weight_splits(model))
    ]
    *layers, around = weights
    n, d, heads, kv_heads = len(tokens), model.head_dim, model.num_attention_heads, model.num_key_value_heads

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight

    def rotate(x):
        angle = torch.arange(n)[:, None, None] * ROTARY_BASE ** -(torch.arange(0, d, 2) / d)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = around["embedding"][tokens]
    for w in layers:
        q, k, v = (norm(x, w["attention_norm"]) @ w["qkv"].T).split((heads * d, kv_heads * d, kv_heads * d), 1)
        q = rotate(norm(q.view(n, heads, d), w["q_norm"]))
        k = rotate(norm(k.view(n, kv_heads, d), w["k_norm"]))
        k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v.view(n, kv_heads, d)))
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", scores, v).reshape(n, -1) @ w["o"].T
        gate, up = (norm(x, w["mlp_norm"]) @ w["gate_up"].T).chunk(2, 1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w["down"].T
    return (norm(x, around["norm"]) @ around["head"].T)[-1]


def _switched(worker, model, from_tp, to_tp):
    """Logits of this rank's sequences a step after a switch, and of the same step without it."""
    with torch.inference_mode():
        old = _built(worker, model, from_tp)
        target = reshard(worker, old, to_tp)
        for weights in target.weights:
            for weight in weights.values():
                weight.zero_()
        replicas, own = worker.size // from_tp, worker.rank // from_tp
        prompts = PROMPTS[own::replicas]
        old.prefill(_flat(prompts), [len(p) for p in prompts], 0)
        moves = spread_moves([len(p) for p in PROMPTS], replicas, worker.size // to_tp)
        assert reshard(worker, old, to_tp, into=target) is target
        migrate(worker, old.cache, from_tp, to_tp, moves)
        here = PROMPTS[worker.rank // to_tp :: worker.size // to_tp]
        fresh = _built(worker, model, to_tp)
        fresh.prefill(_flat(here), [len(p) for p in here], 0)
        contexts, tokens = torch.tensor([len(p) + 1 for p in here]), torch.full((len(here),), 11)
        step = tokens, contexts, int(contexts.max())
        return _all_logits(fresh, fresh.decode(*step)), _all_logits(target, target.decode(*step))


def _parted(worker, model):
    """Tokens of the last prompt, alone and beside others of which one leaves on the way."""
    found = []
    with torch.inference_mode():
        for prompts, leaves in ((PROMPTS[2:], False), (PROMPTS, True)):
            batch = Batch(_built(worker, model, 1))
            batch.prefill(range(len(prompts)), prompts)
            said = []
            for number in range(6):
                if number == 2 and leaves:
                    batch.leave([0])
                place = batch.ids.index(len(prompts) - 1)
                said.append((int(batch.tokens[place]), batch.contexts[place]))
                batch.step()
            assert batch.context_tokens == sum(batch.contexts)
            assert batch.longest == max(batch.contexts)
            found.append(said)
    return found


def _count(worker):
    worker.state["calls"] = worker.state.get("calls", 0) + 1
    return worker.rank, worker.state["calls"]


def _fail(worker):
    if worker.rank == 1:
        raise ValueError("one is enough")
    worker.barrier()


def _die(worker):
    os.kill(os.getpid(), signal.SIGKILL)


def _large_sum(worker):
    ranks = worker.ranks(2)
    x = torch.full((600_001,), float(worker.rank + 1))
    shares = [float(share.mean()) for share in ranks.all_gather(x)]
    ranks.all_reduce(x)
    return (float(x.min()), float(x.max()), len(x)), shares
