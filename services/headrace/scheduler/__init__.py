"""The scheduler: "who runs it, and when?"

``service.py`` is the driver: it turns calls into events, actions into calls, and keeps the clock. ``core.py`` decides,
knowing no clock, socket, task or randomness of its own: ``step(now_s, event) -> actions`` and ``next_wakeup()``. It
asks ``queue.py`` whose turn it is and ``fleet.py`` what is believed of each worker. ``events.py`` and ``actions.py``
are the two vocabularies between driver and core.
"""
