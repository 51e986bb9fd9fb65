"""`python -m rlsim`."""

from rlsim.cli import main

main()
