
ARGS=(actor_rollout_ref.rollout.n=4 "data.train_batch_size=${B:-32}")
if [ "$GPU" = h100 ]; then tp=2; elif [[ -z $GPU ]]; then tp=4; else tp=$((2**2)); fi
case "$MODE" in fast|quick) n=1 ;; *) n=2 ;; esac
for m in a b; do echo $m; done
python3 -m verl.trainer.main_ppo "${ARGS[@]}" actor_rollout_ref.rollout.tensor_model_parallel_size=$tp \
  trainer.nnodes=$n actor_rollout_ref.model.path=Qwen/Qwen3-8B algorithm.adv_estimator=gae trainer.n_gpus_per_node=8 \
  critic.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.strategy=megatron <<EOF
text
EOF
