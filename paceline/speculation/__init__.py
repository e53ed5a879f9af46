"""What guesses next tokens, behind ``core.step.speculation``.

A room above core, which works without it. ``drafts.Drafts`` is what a scheduler is given.
"""
