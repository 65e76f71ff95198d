"""The strategies that ship with the library, one file each."""
