"""`python -m rollwright.cli`."""

from rollwright.cli import main

main()
