"""Two readings of the metrics of a server or a gateway, and the changes between them.

The arithmetic of ``paceline top`` and of the page's promises. Imported on first use.

This module does not know where readings come from, or how they are shown.
"""
