set -x
: "${DATA_DIR:="$HOME/data/sums"}"
: "${NUM_GPUS:=8}"
: "${LOSS:=regular}"
TURNS=4
STOP=(
  generator.sampling_params.stop='["</call>", "</answer>"]'
  generator.use_conversation_multi_turn=false
)
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  trainer.algorithm.advantage_estimator="grpo" \
  trainer.algorithm.policy_loss_type=$LOSS \
  trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \
  trainer.placement.colocate_all=true \
  trainer.strategy=fsdp \
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \
  trainer.placement.ref_num_gpus_per_node=$NUM_GPUS \
  generator.inference_engine.num_engines=$(( NUM_GPUS / 2 )) \
  generator.inference_engine.tensor_parallel_size=2 \
  generator.inference_engine.gpu_memory_utilization=0.7 \
  trainer.train_batch_size=64 \
  trainer.policy_mini_batch_size=32 \
  trainer.micro_forward_batch_size_per_gpu=8 \
  trainer.micro_train_batch_size_per_gpu=4 \
  trainer.max_prompt_length=1024 \
  generator.max_input_length=3072 \
  generator.sampling_params.max_generate_length=512 \
  generator.n_samples_per_prompt=4 \
  generator.max_turns=$TURNS \
  environment.skyrl_gym.max_env_workers=16 \
  "${STOP[@]}" \
  trainer.eval_interval=-1 \
  trainer.run_name="sums-${TURNS}turns" \
  $@
