"""Four bits a weight from a 16-bit model: what is lost is measured on real inputs, and kept small.

``rounding`` rounds one matrix, ``layers`` runs a text through the model and rounds layer by layer,
``text`` is what runs through it, ``output`` writes the file, ``quantize`` does all of it.
"""
