"""The command line and the composition root: flags become settings, settings become objects.

Nothing below this room reads flags or the environment's model cache; nothing here decides how to
serve. Modules import what is heavy inside functions, so that ``paceline --help`` answers at once.
"""
