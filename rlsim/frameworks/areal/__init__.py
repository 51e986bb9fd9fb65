"""All that reads AReaL: its configurations of GRPO and PPO."""
