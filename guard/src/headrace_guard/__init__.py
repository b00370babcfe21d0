"""Verdicts on what goes into a model and what comes out of it."""
