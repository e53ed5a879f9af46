"""What a model is, whatever its files: config, tensors, and what every checkpoint offers."""
