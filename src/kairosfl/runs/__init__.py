"""Experiments: configurations, run folders, sweeps."""

STOPPED = "stopped: "  # begins the last line in the log of a run that cannot go on as it is
