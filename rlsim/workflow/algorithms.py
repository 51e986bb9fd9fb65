"""The RL algorithms as graphs of calls.

Calls on the actor are `generate`, `old_log_prob`, `train` and `weight_sync`, on the reference `ref_log_prob`, on the
critic `values`, `train_critic` and `critic_sync`, on a reward model `reward_score`; `reward` scores outside the models.

veRL's trainer runs them one after the other: generation, rewards, log-probs of the old policy and the reference,
values, updates (`RayPPOTrainer.fit`). With `reward_first` the graph says so: log-probs and values wait at a barrier
until all rewards are there. Without it they run beside the rewards, as with veRL's `launch_reward_fn_async`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlsim.workflow.graph import Call, Edge, Workflow


def _on_policy(
    name: str,
    *,
    reference: bool = True,
    old_log_probs: bool = False,
    reward_model: bool = True,
    reward_first: bool = True,
    critic: bool = False,
    group_advantage: bool = False,
    baselines: int = 0,
) -> Workflow:
    """Generate, score, prepare, train the actor (and the critic), bring the weights to the next step.

    `reference` off is training without a KL term (DAPO); with `old_log_probs` the actor's own log-probs are computed
    anew, else those of the rollout engine serve; with `reward_model` a model scores the responses. `baselines`:
    responses to each prompt that are scored with the others and not trained on.
    """
    generate, train = Call("generate", "generate", "actor", None, baselines), Call("train", "train", "actor")
    sync = Call("weight_sync", "sync", "actor")
    reward = Call("reward_score", "inference", "reward") if reward_model else Call("reward", "reward", "reward")
    others = [Call("old_log_prob", "inference", "actor")] if old_log_probs else []
    others += [Call("ref_log_prob", "inference", "reference")] if reference else []
    others += [Call("values", "inference", "critic")] if critic else []
    prepare = [reward, *others]
    edges = [
        *(Edge(generate.name, call.name) for call in prepare),
        *(Edge(reward.name, call.name, barrier=True) for call in others if reward_first),
        *(Edge(call.name, train.name) for call in prepare),
        Edge(train.name, sync.name),
        Edge(sync.name, generate.name, lag=1),
    ]
    calls = [generate, *prepare, train, sync]
    if old_log_probs:  # nothing to move where it runs as training does
        calls.append(Call("old_log_prob_sync", "sync", "actor"))
        edges += [Edge("train", "old_log_prob_sync"), Edge("old_log_prob_sync", "old_log_prob", lag=1)]
    if critic:
        calls += [Call("train_critic", "train", "critic"), Call("critic_sync", "sync", "critic")]
        edges += [Edge(call.name, "train_critic") for call in prepare]
        edges += [Edge("train_critic", "critic_sync"), Edge("critic_sync", "values", lag=1)]
    return Workflow(name, tuple(calls), tuple(edges), group_advantage)


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


#: As veRL runs it (Shao et al. 2024): no critic, log-probs under the reference and the old policy, one update.
grpo = partial(_on_policy, "grpo", old_log_probs=True, reward_model=False, group_advantage=True)
#: With a critic, as in InstructGPT (Ouyang et al. 2022): six calls on four models, and the new weights' way.
ppo = partial(_on_policy, "ppo", critic=True)
#: Li et al. 2024: no critic; the reward of a greedy response to the same prompt is the baseline.
remax = partial(_on_policy, "remax", baselines=1)
#: DPO on pairs of its own (Guo et al. 2024): two responses to a prompt (`responses: 2`) are generated and scored, the
#: better one is preferred in training, which takes them together.
online_dpo = partial(_on_policy, "online_dpo", group_advantage=True)

ALGORITHMS: dict[str, Callable[..., Workflow]] = {
    "grpo": grpo,
    "ppo": ppo,
    "remax": remax,
    "dpo": dpo,
    "online_dpo": online_dpo,
}
