"""All that reads NeMo-RL: its configurations of GRPO."""
