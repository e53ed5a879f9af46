"""Models learned online: seconds of steps, lengths of outputs, sizes of chunks."""
