"""Stages: where to split, what crosses, and what bits do to a projected gradient, with one exercise."""
