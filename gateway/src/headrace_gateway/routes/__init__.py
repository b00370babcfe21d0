"""The endpoints that FastAPI serves: models, health, metrics. The hot ones are in `asgi`."""
