"""Files and batches: requests that wait for free capacity, kept on disk.

::

    lines      a line of a batch, and its record; no files
    answering  answers one line, as the server would over HTTP; no files
    store      SQLite and files; no event loop, no HTTP, no engine
    runner     answers the lines of all batches; no HTTP
    folder     opens the store on first use, keeps it off the event loop
    upload     writes a multipart body into the store
    routes     /v1/files and /v1/batches
"""
