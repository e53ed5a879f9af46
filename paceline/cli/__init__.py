"""The command line and the composition root: flags become settings, settings become objects.

No package below reads flags or the environment's model cache; no module here decides how to serve.
Modules import heavy dependencies inside functions, so that ``paceline --help`` answers at once.
"""
