"""What `test_fuzz.py` feeds to the commands: seeds, their mutations, and the targets."""
