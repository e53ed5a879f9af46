"""A process that takes turns, for tests: COUNT steps of SECONDS, and how it ends.

    python -m tests.engine.models.turn_engine PAGE SECONDS COUNT [WEIGHT [die|hang]]

Prints a line with the times of each step's begin and end.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

from paceline.engine.models.turn import Turn


def main() -> None:
    page, seconds, count, weight, end = (sys.argv[1:] + ["1", ""][len(sys.argv) - 4 :])[:5]
    turn = Turn(Path(page), float(weight))
    print("ready", flush=True)
    sys.stdin.readline()
    # as two steps in the backend at once: the next is planned before one ends
    turn.planned(float(seconds), math.inf, math.inf)
    for number in range(int(count)):
        if number + 1 < int(count):
            turn.planned(float(seconds), math.inf, math.inf)
        with turn:
            began = time.monotonic()
            time.sleep(float(seconds))
            print(began, time.monotonic(), flush=True)
            if end and number == 2:
                os.kill(os.getpid(), signal.SIGKILL if end == "die" else signal.SIGSTOP)
    turn.close()


if __name__ == "__main__":
    main()
