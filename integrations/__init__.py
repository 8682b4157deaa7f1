"""Doors to other tools: the engines and agents of this project behind the interfaces that those tools expect."""
