"""One step: limits, rows, admission, results. Complete without targets."""
