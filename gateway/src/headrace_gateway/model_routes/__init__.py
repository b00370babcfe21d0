"""Names of models that are no model: aliases, splits, fallbacks, cascades."""
