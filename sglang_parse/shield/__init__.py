"""Checks of requests for any SGLang 0.5.23 server; it knows nothing of PARSE.

Some requests end a stock server's scheduler, are answered with HTTP 500 although the
request is at fault, or break the response off. The shield answers them with HTTP 400
and one sentence. `tests/support/hostile_requests.py` lists the requests, and
`tests/integration/test_shield.py` sends them to a stock server, so that a check is
removed when SGLang fixes its cause.
"""
