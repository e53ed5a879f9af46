"""The endpoints that give vectors: embeddings, scores, ranks and classes."""
