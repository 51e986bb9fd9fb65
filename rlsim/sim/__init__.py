"""The clock: requests, replicas, rollouts, calls and the recorder. SimPy lives here and only here."""
