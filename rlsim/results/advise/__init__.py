"""What fits, why GPUs are idle, which system to take, and how many GPUs pay: `rlsim advise`."""
