"""``paceline calibrate``: when a small model's answer is good enough, measured.

::

    labels     prompts, each with a checker        checkers   an answer -> its quality, 0 to 1
    asking     both models asked, answers kept     curves     cost against quality, with baselines
    shadows    shadow traffic of a gateway, instead of labels
    fitting    answers -> scorers -> the calibration file
"""
