"""The topics of the study, by name: one file per topic.

A topic's file defines `TOPIC`. Files are imported on demand, so that a topic loads only what it needs.
"""

from __future__ import annotations

from importlib import import_module

from ...checks import choice
from .base import Topic

# name -> the question it answers, in the recommended reading order
TOPICS = {
    "example": "what happens to one query, number by number?",
    "order": "does attention depend on the order of the words?",
    "sqrtd": "why is the score divided by the square root of the head's width?",
    "sinusoids": "how does the sinusoidal table write a position, and what does a shift do to it?",
    "relative": "does a score depend on the distance alone?",
    "pairing": "which two entries form a pair, and what if a file forms other pairs?",
    "decay": "does a score fall with the distance?",
    "scale": "how far does each pair turn in training, and by how much does each scaling divide its frequency?",
    "ppl": "how far does each method stretch the context of a real model?",
    "trained": "how good is each position encoding after the same training, and how far does it reach?",
    "bands": "what does a trained model use fast and slow pairs for?",
    "variants": "what changes if a part of each head rotates, and in two dimensions?",
    "others": "how do other encodings make scores depend on the distance?",
    "needle": "does a stretched model recall a fact that lies far back?",
    "precision": "how exact are the angles, by position and by dtype?",
    "bugs": "what does a wrong line cause, and how is it repaired?",
}


def find(name: str) -> Topic:
    """The topic of that name. Raises UsageError if there is none."""
    topic: Topic = import_module(f".{choice('topic', name, TOPICS)}", __name__).TOPIC
    return topic
