"""The charts of a report, each made from one of the tables in `rlsim.report.frames`."""
