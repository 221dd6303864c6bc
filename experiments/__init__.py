"""Two commands that train real models under mpjax: `train` and `compare`.

    python -m experiments.train gpt
    python -m experiments.compare resnet --seeds 3

`config` parses what is asked for, `tasks` pairs a model with its data, `loop` trains it, and the
rest watches and keeps the results.
"""
