"""Pictures and pages: what a researcher looks at after, or during, a run."""
