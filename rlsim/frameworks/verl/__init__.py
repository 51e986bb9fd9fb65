"""All that reads veRL: its configurations, run scripts and logs."""
