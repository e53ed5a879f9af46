"""Loading of a checkpoint into a backend: device, formats, sizes, loaders."""
