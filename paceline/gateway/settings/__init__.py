"""The gateway's configuration file, checked: engines, models, prices, engine types."""
