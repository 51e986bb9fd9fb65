
n_gpus_rollout=2
python -m verl.experimental.fully_async_policy.fully_async_main \
    data.train_batch_size=0 data.gen_batch_size=1 data.max_prompt_length=1024 data.max_response_length=2048 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    trainer.nnodes=1 trainer.n_gpus_per_node=$((8 - n_gpus_rollout)) \
    rollout.nnodes=1 rollout.n_gpus_per_node=${n_gpus_rollout} rollout.total_rollout_steps=1000 \
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=2 async_training.partial_rollout=True \
    async_training.use_rollout_log_probs=True
