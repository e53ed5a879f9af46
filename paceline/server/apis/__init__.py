"""Each API that is served, in a folder or file of its own: its bodies, routes and answers."""
