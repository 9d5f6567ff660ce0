"""Experiments: configurations, run folders, sweeps."""

GIVEN_UP = "given up: "  # begins the last line in the log of a run that cannot go on as it is
