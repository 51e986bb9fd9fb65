"""What rlsim is held to: measured and published rows, and the runner that compares with them. No part of the wheel."""
