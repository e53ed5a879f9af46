"""Hidden states to vectors: pooling for any model that computes hidden states."""
