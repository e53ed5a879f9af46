"""The compute path in PyTorch: weights, decoder, paged attention, sampling.

Reading order: ``load`` -> ``step`` (arrays to tensors) -> ``model`` -> ``attention`` and ``linear``
(the seams for faster kernels) -> ``sampler``.
"""
