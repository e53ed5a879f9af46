"""Output of commands: log lines, progress bars, tables."""
