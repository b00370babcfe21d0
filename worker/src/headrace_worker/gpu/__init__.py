"""Everything that one GPU has to show: `make gpu-check` and `make gpu-bench`, each in one call."""
