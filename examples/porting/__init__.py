"""A layer of somebody else's model moved onto the interface; docs/porting.md goes through it."""
