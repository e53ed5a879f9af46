"""The native kernels against the machine, each other and float32; see ``__main__``."""
