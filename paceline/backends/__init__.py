"""Backends carry plans out. One module or package each; all pass the same contract tests."""
