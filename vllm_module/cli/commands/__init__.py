"""The commands: one file each, named after its command."""
