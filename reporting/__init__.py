"""Tables, figures and pages of what was played."""

import qlass as qlass  # it says in one line which package is missing
