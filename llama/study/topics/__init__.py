"""The topics of the study: one file a topic, found here by name.

A topic's file defines `TOPIC`. Files are imported on demand, so that one topic does not pay for the others.
"""

from __future__ import annotations

from importlib import import_module

from ...errors import UsageError
from .base import Topic

# name -> the question it answers; in the order in which they are best read
TOPICS = {
    "example": "what happens to one query, number by number?",
    "order": "can attention tell two orders of the same words apart?",
    "sqrtd": "why is the score divided by the square root of the head's width?",
    "softmax": "how much does a weight move when a score moves?",
    "heatmap": "what does the sinusoidal table look like?",
    "binary": "in what sense is a position written in digits?",
    "shift": "is the code of position t + k a linear function of the code of position t?",
    "relative": "does a score depend on the distance alone?",
    "pairing": "which two entries make a pair, and what if the file means others?",
    "wavelengths": "how far does each pair turn within a context?",
    "decay": "do far tokens count less?",
    "clock": "what do the ways to stretch a context do to the hands of a clock?",
    "scale": "what does every scaling do to every pair?",
    "ppl": "how far does each way to stretch a context reach, on a real model?",
    "heads": "which frequencies does a trained model use, and how far does it look?",
    "precision": "how exact are the angles, by position and by dtype?",
    "errata": "which sentences of the notes are wrong, and how does one see it?",
}


def find(name: str) -> Topic:
    """The topic of that name."""
    if name not in TOPICS:
        raise UsageError(f"unknown topic {name!r}; known: {', '.join(TOPICS)}")
    topic: Topic = import_module(f".{name}", __name__).TOPIC
    return topic
