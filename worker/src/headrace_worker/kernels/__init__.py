"""The operations a model needs, and the one place that chooses between backends."""
