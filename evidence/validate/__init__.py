"""Published and measured figures beside what rlsim says."""
