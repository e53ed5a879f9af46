"""The endpoints that return vectors: embeddings, scores, ranks and classes."""
