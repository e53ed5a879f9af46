"""Reports of a run: figures, tables, plots, timelines."""
