"""The scenarios, one module for each kind."""
