"""The scheduler's decisions as a stream of small binary frames, for viewers.

::

    EngineCore --> tap.py --frames--> EngineLoop ==TimelineNews==> the process that serves
                                                                        |
                                        model.py, or the page's model.js <---'  each viewer

``events.py`` names the frames and events, ``codec.py`` turns them into bytes and back, ``tap.py``
writes them at a bounded cost (with ``steps.py`` and ``lanes.py``),
``model.py`` rebuilds from frames which requests run or wait, and why, and ``chrome.py`` writes that
as a trace for Perfetto. Nothing here holds prompts, outputs or token ids.
"""
