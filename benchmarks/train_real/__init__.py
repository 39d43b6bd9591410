"""An EAGLE-3 head for the real model: `python -m benchmarks.train_real`."""
