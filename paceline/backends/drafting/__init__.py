"""Models and heads that draft tokens before they are verified."""
