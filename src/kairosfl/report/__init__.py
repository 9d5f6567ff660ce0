"""Plots and pages for researchers, after or during a run."""
