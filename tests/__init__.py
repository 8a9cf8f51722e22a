"""Tests by package; what several of them need is in ``tests.support``."""
