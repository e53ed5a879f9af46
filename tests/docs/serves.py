"""``paceline serve`` of an example: from the start to the ready line, then SIGTERM and a clean end.

Run by the ``paceline`` that tests/docs/test_blocks.py puts on an example's path.
"""

from __future__ import annotations

import sys

from tests.cli.servers import start_server


def main() -> int:
    # a free port instead of the example's, since the last one counts
    with start_server(*sys.argv[1:], "--port", "0") as server:
        print(server.ready_line.strip())
        code, _ = server.stop()
    if code:
        print("".join(server.errors), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
