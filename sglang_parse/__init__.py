"""PARSE (arXiv:2605.04263) as an out-of-tree plugin for stock SGLang.

Importing this package loads neither torch nor sglang.
"""

__version__ = "0.1.0"
