"""A worker whose engine is somebody else's OpenAI-compatible server."""
