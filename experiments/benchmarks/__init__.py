"""What `python -m experiments.bench` measures.

`models` says what is computed, `steps` how each library trains it, `timing` measures them by turns, the suites
put these together, and `show` prints and draws.
"""
