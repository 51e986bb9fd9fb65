"""Parts that a line of YAML names come in; decisions of the rollout, batchings, plans and rewired workflows go out.

One file for each published system, in the order of the paper's steps.
"""
