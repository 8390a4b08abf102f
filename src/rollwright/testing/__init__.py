"""What the tests of Rollwright, and of its plug-ins, are made with: fakes that really run, and contract suites."""
