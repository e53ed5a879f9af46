"""The model that any files describe: config, tensors, and the interface of checkpoints."""
