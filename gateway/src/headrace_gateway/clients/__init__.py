"""Thin typed adapters to the other services: deadlines and error mapping, no policy."""
