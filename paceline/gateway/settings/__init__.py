"""What the gateway's file says, checked: engines, models, prices, and kinds of engines as data."""
