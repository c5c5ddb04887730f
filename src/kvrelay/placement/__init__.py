"""Where a prefill runs, in seconds: thresholds, costs and their fit. Pure."""
