"""`sglang-parse bench` and `sglang-parse calibrate`.

config -> arms -> run (servers, procedures, cells) -> grade -> summary -> table, plots.
"""
