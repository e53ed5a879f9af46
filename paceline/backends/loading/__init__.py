"""From a checkpoint to a backend: device, formats, sizes, and what loads it."""
