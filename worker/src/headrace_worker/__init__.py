"""One engine on one device: continuous batching, paged KV, prefix cache, the Worker contract."""
