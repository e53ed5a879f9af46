"""A model backend in PyTorch: weights, decoder, paged attention, sampling, and the runner.

``backend.TorchBackend`` is the way in. Reading order: ``backend`` (threads, sizing) -> ``runner``
(plans to tensors) -> ``model`` -> ``attention`` and ``linear`` (the seams for faster kernels) ->
``sampler``.
"""
