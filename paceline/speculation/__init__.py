"""Sources of draft tokens, behind ``core.step.speculation``.

A package above core, which works without it. ``drafts.Drafts`` is the object for a scheduler.
"""
