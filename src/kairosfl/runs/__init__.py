"""Experiments: configurations, run folders, sweeps."""

IDLE_LIMIT = 10  # rounds without a good report, one after another, end a run
