"""The report of result files: tables, figures, a page. report.py is its door."""

import os
import tempfile

os.environ.setdefault(
    "HOME", tempfile.gettempdir()
)  # where matplotlib looks for its settings; a container may have none
