# after verl-project/verl#453: four sequences of up to 1,024 + 16,384 tokens a micro-batch, Ulysses 2
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=16384 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.use_dynamic_bsz=False \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.gpu_memory_utilization=0.8 actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  trainer.n_gpus_per_node=8 trainer.nnodes=4 trainer.experiment_name=c23
