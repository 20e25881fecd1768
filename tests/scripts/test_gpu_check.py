"""The check of a GPU, run without one: every part runs, a broken one stops no other, and limits are judged right."""

from __future__ import annotations



