"""The gateway before other projects' servers."""
