"""The model side of the worker: shapes, weights, layers, and the runner that the engine calls."""
