"""Hidden states to vectors: what pools, whatever computes the hidden states."""
