"""What the simulated device itself costs."""
