"""Runnable examples that the pages of docs/ are cut from."""
