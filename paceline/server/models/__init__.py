"""Several models in one server: which one a request is for, and what callers see of them."""
