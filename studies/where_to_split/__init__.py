"""Stages: where to cut, what crosses, and what bits do to a projected gradient, with one exercise."""
