"""Cascade of one model: the small one first, where that is good enough.

::

    runner     which requests have a cascade      run      one of them
    judge      scores and thresholds of one model, by its calibration
    prompt     what a request asks        answer   what a model said
    asked      a request as it comes, and what stands where there is no cascade
    early      the large model begins while a prefix is held
    shadow     both models asked, and their answers compared
    gate       a stream whose first tokens are held back
"""
