"""Answers held to a schema, a grammar or calls of functions, by llguidance's masks."""
