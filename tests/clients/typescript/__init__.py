"""TypeScript's compiler over clients/typescript.

``python -m tests.clients.typescript`` installs the compiler (once, in the cache's ``clients``
folder), checks the sources against what their comments say of types, what a caller of the package
may write and may not, and that the committed declarations are those of the sources; with
``--write`` it renews them.
"""
