"""One request on its way: placed, sent, tried again, and its answer back."""
