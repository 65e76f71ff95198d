"""Speed and memory targets, measured."""
