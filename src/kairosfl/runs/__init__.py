"""Experiments: configurations, run folders, sweeps."""

STOPPED = "stopped: "  # prefix of the last log line of a run that cannot continue as it is
