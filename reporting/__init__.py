"""What is made of results: tables, figures, pages."""

import os
import tempfile

os.environ.setdefault("HOME", tempfile.gettempdir())  # matplotlib asks for it
os.environ["MPLBACKEND"] = "agg"  # not a notebook's, which needs its packages
