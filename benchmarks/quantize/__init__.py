"""What four bits cost: ``paceline quantize`` on a twin of the default model."""
