"""What is learned: seconds of steps, lengths of outputs, sizes of chunks."""
