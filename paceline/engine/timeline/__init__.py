"""What the scheduler does, as a stream of small binary frames for those who watch.

::

    EngineCore --> tap.py --frames--> EngineLoop ==TimelineNews==> the process that serves
                                                                        |
                                        model.py, or the page's model.js <---'  each viewer

``events.py`` names what is told, ``codec.py`` turns it into bytes and back, ``tap.py`` tells it at
a bounded cost (with ``steps.py``, ``lanes.py``, ``door.py`` and ``ladder.py``), ``model.py``
rebuilds from frames who runs, waits and why, ``chrome.py`` writes it as a trace for Perfetto.
Nothing here holds prompts, outputs or token ids.
"""
