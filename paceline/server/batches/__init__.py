"""Files and batches: requests that wait for free capacity, kept on disk.

::

    lines      what a line of a batch is, and its record; no files
    answering  one line on the engine, as the server would answer it; no files
    store      SQLite and files; no event loop, no HTTP, no engine
    runner     answers the lines of all batches; no HTTP
    folder     opens the store when it is first needed, keeps it off the event loop
    upload     a multipart body into the store
    routes     /v1/files and /v1/batches
"""
