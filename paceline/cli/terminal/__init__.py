"""What commands print: log lines, progress bars, tables."""
