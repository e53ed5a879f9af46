"""The machine as it is: processors, nodes, memory, and the placement of threads."""
