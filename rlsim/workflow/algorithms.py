"""The RL algorithms as graphs of calls.

Calls on the actor are `generate`, `old_log_prob`, `train` and `weight_sync`, on the reference `ref_log_prob`, on the
critic `values`, `train_critic` and `critic_sync`, on a reward model `reward_score`; `reward` scores outside the models.

veRL's trainer runs them one after the other: generation, rewards, log-probs of the old policy and the reference,
values, updates (`RayPPOTrainer.fit`). With `reward_first` the graph says so: log-probs and values wait at a barrier
until all rewards are there. Without it they run beside the rewards, as with veRL's `launch_reward_fn_async`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlsim.workflow.graph import Call, Edge, Workflow


def grpo(
    *, reference: bool = True, old_log_probs: bool = True, reward_model: bool = False, reward_first: bool = True
) -> Workflow:
    """GRPO as veRL runs it: generate, score, log-probs under the reference and the old policy, one update, weight sync.

    GRPO (Shao et al. 2024) has no critic; `reference` off is training without a KL term (DAPO), `old_log_probs` off
    takes those of the rollout engine. With `reward_model` a model scores the responses.
    """
    prepare = [_reward(reward_model), *_log_probs(reference, old_log_probs)]
    return _on_policy("grpo", prepare, reward_first, group_advantage=True)


def ppo(
    *, reference: bool = True, old_log_probs: bool = False, reward_model: bool = True, reward_first: bool = True
) -> Workflow:
    """PPO with a critic, as in InstructGPT (Ouyang et al. 2022): six calls on four models, and the new weights' way."""
    values, train_critic = Call("values", "inference", "critic"), Call("train_critic", "train", "critic")
    prepare = [_reward(reward_model), *_log_probs(reference, old_log_probs), values]
    base = _on_policy("ppo", prepare, reward_first)
    sync = Call("critic_sync", "sync", "critic")
    return Workflow(
        "ppo",
        (*base.calls, train_critic, sync),
        (
            *base.edges,
            *(Edge(call.name, train_critic.name) for call in prepare),
            Edge(train_critic.name, sync.name),
            Edge(sync.name, values.name, lag=1),
        ),
    )


def remax(
    *, reference: bool = True, old_log_probs: bool = False, reward_model: bool = True, reward_first: bool = True
) -> Workflow:
    """ReMax (Li et al. 2024): no critic; the reward of a greedy response to the same prompt is the baseline.

    The greedy responses are generated and scored with the others and not trained on.
    """
    prepare = [_reward(reward_model), *_log_probs(reference, old_log_probs)]
    return _on_policy("remax", prepare, reward_first, baseline_responses=1)


def dpo() -> Workflow:
    """DPO (Rafailov et al. 2023): log-probs of given pairs of responses under the reference, then training.

    The next batch is taken when this one is trained on.
    """
    reference, train = Call("ref_log_prob", "inference", "reference"), Call("train", "train", "actor")
    edges = (
        Edge(reference.name, train.name),
        Edge(train.name, reference.name, lag=1),
        Edge(train.name, train.name, lag=1),
    )
    return Workflow("dpo", (reference, train), edges)


def online_dpo(
    *, reference: bool = True, old_log_probs: bool = False, reward_model: bool = True, reward_first: bool = True
) -> Workflow:
    """DPO on pairs of its own (Guo et al. 2024): two responses to a prompt are generated and scored, the better one is
    preferred in training, which takes them together (`responses: 2`)."""
    prepare = [_reward(reward_model), *_log_probs(reference, old_log_probs)]
    return _on_policy("online_dpo", prepare, reward_first, group_advantage=True)


def _reward(reward_model: bool) -> Call:
    return Call("reward_score", "inference", "reward") if reward_model else Call("reward", "reward", "reward")


def _log_probs(reference: bool, old_log_probs: bool) -> Iterable[Call]:
    if old_log_probs:
        yield Call("old_log_prob", "inference", "actor")
    if reference:
        yield Call("ref_log_prob", "inference", "reference")


def _on_policy(
    name: str, prepare: list[Call], reward_first: bool, *, group_advantage: bool = False, baseline_responses: int = 0
) -> Workflow:
    """Generate, prepare (rewards are the first of `prepare`), train the actor, bring its weights to the next step."""
    generate, train = Call("generate", "generate", "actor"), Call("train", "train", "actor")
    sync = Call("weight_sync", "sync", "actor")
    reward, *others = prepare
    edges = [
        *(Edge(generate.name, call.name) for call in prepare),
        *(Edge(reward.name, call.name, barrier=True) for call in others if reward_first),
        *(Edge(call.name, train.name) for call in prepare),
        Edge(train.name, sync.name),
        Edge(sync.name, generate.name, lag=1),
    ]
    calls = [generate, *prepare, train, sync]
    for call in prepare:
        if call.model == "actor":  # nothing to move where it runs as training does
            again = Call(f"{call.name}_sync", "sync", "actor")
            calls.append(again)
            edges += [Edge(train.name, again.name), Edge(again.name, call.name, lag=1)]
    return Workflow(name, tuple(calls), tuple(edges), group_advantage, baseline_responses)


ALGORITHMS: dict[str, Callable[..., Workflow]] = {
    "grpo": grpo,
    "ppo": ppo,
    "remax": remax,
    "dpo": dpo,
    "online_dpo": online_dpo,
}
