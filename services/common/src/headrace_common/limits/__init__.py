"""The arithmetic of limits, and what is granted when nobody can be asked. Used by two services."""
