"""What this machine offers: processors, nodes, memory, and who computes where."""
