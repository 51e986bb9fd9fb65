#!/usr/bin/env bash
set -x
max_prompt_length=$((1024 * 2))
max_response_length=$((max_prompt_length * 2))   # a comment with a 'quote
NNODES=${NNODES:-1}
MODEL_PATH=${MODEL_PATH:-"$HOME/models/Qwen2.5-7B-Instruct"}
offload=True
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['$HOME/gsm8k.parquet', '$HOME/math.parquet']" \
    data.train_batch_size=64 \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    +actor_rollout_ref.model.use_fused_kernels=False \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000 \
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=${offload} \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.mode=sync \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="${NNODES}" \
    trainer.experiment_name='qwen2.5 7b' $@
