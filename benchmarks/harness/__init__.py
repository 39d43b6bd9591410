"""Arms on data sets, measured in paired turns and graded.

`python -m benchmarks.harness` measures what a config describes.
"""
