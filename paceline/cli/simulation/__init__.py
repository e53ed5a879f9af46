"""Commands that simulate: ``plan``, ``simulate``, and the process of the page's what-if."""
