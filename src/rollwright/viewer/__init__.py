"""Look at run folders in a browser: read-only pages on the loopback address, or the same as a static site.

`library` knows the runs and their indexes, `pages` makes HTML of them, `app` serves it, `bundle` writes it to files.
"""

from __future__ import annotations
