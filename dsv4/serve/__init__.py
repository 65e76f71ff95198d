"""Serving: requests in, tokens out, on one decoder and its workspace."""
