"""Paged caches: byte layouts, block tables and the allocator of their blocks."""
