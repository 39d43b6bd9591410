"""The command `sglang-parse calibrate`: settings, their measurement and the choice."""
