"""Batch work: files of requests, worked off at class ``batch`` behind everything else.

``store.py`` keeps files and batches on disk, ``lines.py`` says what a line of a file may be and how its answer is
written, ``pace.py`` decides how many lines run at once, ``runner.py`` works batches off, and ``service.py`` answers
``headrace.v1.BatchService`` for the router's doors. It all lives in the router's process, beside the data plane.
"""
