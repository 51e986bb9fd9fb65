"""A model, a GPU, a calibration and a shape come in; seconds and bytes go out.

Decode, prefill, training, collectives, transfers, weight syncs and memory: pure functions that know no clock.
"""
