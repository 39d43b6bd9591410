"""Hostile and valid requests against a running server: a fuzzer and a soak.

python -m benchmarks.reliability fuzz --start --seconds 120 --seed 1
python -m benchmarks.reliability soak --start --minutes 60 --concurrency 32
"""
