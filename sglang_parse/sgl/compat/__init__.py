"""Every change that PARSE makes to an object of SGLang while it runs, one a function.

Hooks, which replace functions before SGLang starts, are in plugin/hooks.py. Each
function here names the file of sglang 0.5.23 that makes it necessary and what would end
the need. tests/contract/test_compat.py and test_source_text.py fail when it changes.
"""
