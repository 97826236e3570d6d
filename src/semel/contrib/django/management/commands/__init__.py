"""The commands, each by the name of its file."""
