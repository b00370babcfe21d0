"""Classifiers: what looks at text and says where something is. One thing a file."""
