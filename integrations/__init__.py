"""Doors to other tools: the engines and agents of this project behind the interfaces that those tools expect."""

import qlass as qlass  # it says in one line which package is missing
