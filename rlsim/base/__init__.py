"""Files and text come in; checked records, and messages that name the line, go out.

YAML and tables with the line of every fault, files that are written whole or not at all, the names of what ships with
rlsim, charts, and hooks that run users' code. Nothing here knows what a GPU is.
"""
