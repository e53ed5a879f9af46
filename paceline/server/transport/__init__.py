"""Around every exchange: middleware, how handlers answer, errors in each API's shape."""
