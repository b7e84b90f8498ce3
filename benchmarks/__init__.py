"""Head-to-head benchmark of headrace's data pipeline against the loaders that install from PyPI.

`python -m benchmarks.setup` prepares a scratch folder, `python -m benchmarks W1` measures. See README.md.
"""
