"""Seconds and bytes of decode, prefill, training, transfers and memory: pure functions that know no clock."""
