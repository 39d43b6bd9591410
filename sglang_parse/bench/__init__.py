"""The commands that measure: `bench`, `calibrate`, `estimate` and `probe`."""
