"""The cache index: which replica holds which prefix blocks, kept in Redis."""
