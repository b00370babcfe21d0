"""Typed calls to other services."""
